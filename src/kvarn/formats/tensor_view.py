"""A WeightSource viewed under other names: renamed, sliced by rows, stacked, changed. Copies only where it must.

Rows are the tensor flattened to (rows, last axis). Quantised rows are contiguous: a slice of rows is a slice of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.weights import Float8Matrix, TensorInfo, TensorType, WeightSource, float8_of

Change = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [first, first + num_rows) of one tensor of the source."""

    tensor: str
    first: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class ViewEntry:
    """One tensor of a view: the parts one after the other, and what is computed of them (then always F32)."""

    info: TensorInfo
    parts: tuple[RowRange, ...]
    change: Change | None = None


def renamed(info: TensorInfo, name: str) -> ViewEntry:
    """Rename a tensor."""
    return ViewEntry(replace(info, name=name), (RowRange(info.name, 0, num_rows(info)),))


def shifted(entry: ViewEntry, offset: float) -> ViewEntry:
    """Add a constant to every value."""
    return changed(entry, lambda values: values + np.float32(offset))


def changed(entry: ViewEntry, change: Change) -> ViewEntry:
    """Compute something of every value."""
    assert entry.change is None, f"{entry.info.name} is changed already"
    return ViewEntry(replace(entry.info, type=TensorType.F32), entry.parts, change)


def gathered(entry: ViewEntry, name: str, ranges: Iterable[tuple[int, int]]) -> ViewEntry:
    """Take several ranges (first, count) of rows of an unstacked tensor, one after the other."""
    slices = [row_slice(entry, name, first, count) for first, count in ranges]
    parts = tuple(part for one in slices for part in one.parts)
    shape = (sum(part.num_rows for part in parts), *entry.info.shape[1:])
    return ViewEntry(TensorInfo(name, entry.info.type, shape), parts, entry.change)


def row_slice(entry: ViewEntry, name: str, first: int, count: int) -> ViewEntry:
    """Take rows [first, first + count) of an unstacked tensor of one or two axes."""
    (part,) = entry.parts
    if first < 0 or count < 1 or first + count > part.num_rows:
        raise FormatError(
            f"tensor {entry.info.name} has {part.num_rows} rows, {name} needs rows {first} to {first + count}; "
            "the metadata does not belong to these weights"
        )
    info = TensorInfo(name, entry.info.type, (count, *entry.info.shape[1:]))
    return ViewEntry(info, (RowRange(part.tensor, part.first + first, count),), entry.change)


def stacked(name: str, members: Iterable[ViewEntry]) -> ViewEntry:
    """Stack equally shaped tensors along a new first axis."""
    entries = list(members)
    first = entries[0].info
    for entry in entries:
        if (entry.info.type, entry.info.shape) != (first.type, first.shape):
            raise FormatError(
                f"{name}: {entry.info.name} is {entry.info.type.name} {entry.info.shape}, "
                f"{first.name} is {first.type.name} {first.shape}; all experts must be alike"
            )
    info = TensorInfo(name, first.type, (len(entries), *first.shape))
    return ViewEntry(info, tuple(part for entry in entries for part in entry.parts))


def num_rows(info: TensorInfo) -> int:
    """Count the rows of a tensor; a vector has one value per row."""
    return info.num_values // _row_values(info)


class WeightView:
    """The tensors named in entries, taken from source."""

    def __init__(self, source: WeightSource, entries: Mapping[str, ViewEntry]) -> None:
        self.source = source
        self.entries = dict(entries)
        self._stored = source.tensors
        self._tensors = {name: entry.info for name, entry in self.entries.items()}

    @property
    def path(self) -> str:
        return self.source.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.source.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def float8(self, name: str) -> Float8Matrix | None:
        """Of a matrix that is one run of rows of a stored one."""
        entry = self.entries[name]
        if entry.change is not None or len(entry.parts) != 1 or len(entry.info.shape) != 2:
            return None
        (part,) = entry.parts
        found = float8_of(self.source, part.tensor)
        return None if found is None else replace(found, begin=part.first, end=part.first + part.num_rows)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        entry = self.entries[name]
        if entry.change is not None:
            return self.array(name).reshape(-1).view(np.uint8)
        pieces = [self._raw_part(part) for part in entry.parts]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        entry = self.entries[name]
        pieces = [self._array_part(part) for part in entry.parts]
        values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        values = values.reshape(entry.info.shape)
        return values if entry.change is None else entry.change(values)

    def release_pages(self, names: Iterable[str]) -> None:
        self.source.release_pages({part.tensor for name in names for part in self.entries[name].parts})

    def verify_unchanged(self) -> None:
        self.source.verify_unchanged()

    def close(self) -> None:
        self.source.close()

    def _raw_part(self, part: RowRange) -> npt.NDArray[np.uint8]:
        info = self._stored[part.tensor]
        raw = self.source.raw(part.tensor)
        if part.num_rows == num_rows(info):
            return raw
        if _row_values(info) % info.type.block_values:
            raise FormatError(f"tensor {info.name} of type {info.type.name} cannot be cut into rows", file=self.path)
        row_bytes = info.type.num_bytes(_row_values(info))
        return raw[part.first * row_bytes : (part.first + part.num_rows) * row_bytes]

    def _array_part(self, part: RowRange) -> npt.NDArray[np.float32]:
        info = self._stored[part.tensor]
        rows = self.source.array(part.tensor).reshape(num_rows(info), -1)
        return rows[part.first : part.first + part.num_rows]


def _row_values(info: TensorInfo) -> int:
    return info.shape[-1] if len(info.shape) > 1 else 1
