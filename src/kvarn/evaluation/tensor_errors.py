"""Tensor by tensor: what a quantised file keeps of its source's weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvarn.formats.open import open_weights
from kvarn.models.describe import describe


@dataclass(frozen=True, slots=True)
class TensorError:
    """relative_rms: root mean square of the error over that of the source's values; signal_db: the same in decibels."""

    name: str
    type: str
    source_type: str
    num_values: int
    num_bytes: int
    relative_rms: float

    @property
    def signal_db(self) -> float:
        return math.inf if self.relative_rms == 0 else -20 * math.log10(self.relative_rms)


def tensor_errors(model: Path, source: Path) -> Iterator[TensorError]:
    """Compare every tensor that both files have, in the model's order, one at a time in memory."""
    opened = open_weights(model)
    try:
        original = open_weights(source)
        try:
            ours, theirs = describe(opened).weights, describe(original).weights
            for name, info in ours.tensors.items():
                before = theirs.tensors.get(name)
                if before is None or before.shape != info.shape:
                    continue
                values = theirs.array(name)
                norm = float(np.linalg.norm(values))
                difference = float(np.linalg.norm(ours.array(name) - values))
                error = difference / norm if norm else 0.0
                yield TensorError(name, info.type.name, before.type.name, info.num_values, info.num_bytes, error)
                ours.release_pages((name,))
                theirs.release_pages((name,))
        finally:
            original.close()
    finally:
        opened.close()
