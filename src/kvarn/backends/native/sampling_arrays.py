"""What the choices of a step depend on, as the few arrays that cross into the core."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np

from kvarn.backends.batch import Int32, RowSampling, RowsAt
from kvarn.backends.native import _native

_RECORD: Any = np.dtype(_native.sampling_record)  # the numbers of a RowSampling, as the core names and places them
_numbers = attrgetter(*_RECORD.names)
NO_IDS, _NO_VALUES = np.empty(0, np.int32), np.empty(0, np.float32)
_NO_MASKS = np.empty((0, 0), np.uint32)


class SamplingArrays:
    """The arrays of the last step, whose positions alone are written again for the same rows at other ones."""

    def __init__(self) -> None:
        self._base: tuple[RowSampling, ...] = ()
        self._arrays = sampling_arrays(self._base)

    def of(self, rows: Sequence[RowSampling]) -> _native.SamplingArrays:
        if not isinstance(rows, RowsAt):
            return sampling_arrays(rows)
        if self._base is not rows.base:
            self._base, self._arrays = rows.base, sampling_arrays(rows.base)
        self._arrays[0].view(_RECORD)["position"][:, 0] = rows.positions  # not read where the temperature is 0
        return self._arrays


def sampling_arrays(rows: Sequence[RowSampling]) -> _native.SamplingArrays:
    """All rows as a few arrays: a step crosses into the core once."""
    with np.errstate(over="ignore", under="ignore"):
        records = np.array([_numbers(row) for row in rows], _RECORD)
    biased, seen = [row.bias_ids for row in rows], [row.seen_ids for row in rows]
    bias_starts, seen_starts = _starts(biased), _starts(seen)
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    return (
        records.view(np.uint8).reshape(len(rows), _RECORD.itemsize),
        np.concatenate(biased) if bias_starts[-1] else NO_IDS,
        np.concatenate([row.bias_values for row in rows]) if bias_starts[-1] else _NO_VALUES,
        bias_starts,
        np.concatenate(seen) if seen_starts[-1] else NO_IDS,
        np.concatenate([row.seen_counts for row in rows]) if seen_starts[-1] else NO_IDS,
        seen_starts,
        np.array(masked, np.int32) if masked else NO_IDS,
        np.stack([row.mask for row in rows if row.mask is not None]) if masked else _NO_MASKS,
    )


def _starts(parts: Sequence[Int32]) -> Int32:
    return np.array([0, *accumulate(map(len, parts))], np.int32)
