"""The grid that stored blocks round to, apart from the quants: read the scales, choose other quants, store those.

value = scale * level + low, where level is one of a type's levels; the quant is its index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.formats.block_quants import IQ4_NL_LEVELS, Bytes, Floats, pack_bits, pack_nibbles, read_half
from kvarn.formats.k_quants import gather, scales_and_mins, scales_q3_k
from kvarn.formats.weights import TensorType

T = TensorType


@dataclass(frozen=True, slots=True)
class StoredGrid:
    """scales and lows are (blocks, groups), of block_values / groups values each; levels ascend."""

    scales: Floats
    lows: Floats
    levels: Floats
    block_values: int

    @property
    def group(self) -> int:
        """How many values share a scale."""
        return self.block_values // int(self.scales.shape[1])

    @property
    def scale(self) -> Floats:
        """For each value: (blocks, values)."""
        return np.repeat(self.scales, self.group, axis=1)

    @property
    def low(self) -> Floats:
        """For each value: (blocks, values)."""
        return np.repeat(self.lows, self.group, axis=1)

    @property
    def is_uniform(self) -> bool:
        """Whether the levels are whole numbers, one after another."""
        return bool((np.diff(self.levels) == 1).all())


def grid_of(stored: Bytes, type: TensorType) -> StoredGrid:
    """The grid of blocks, (blocks, bytes)."""
    scale, low, levels = (np.asarray(part, np.float32) for part in _READERS[type](stored))
    return StoredGrid(scale, low, levels, type.block_values)


def with_quants(stored: Bytes, type: TensorType, quants: npt.NDArray[np.uint8]) -> Bytes:
    """The same blocks with other quants, (blocks, values)."""
    changed = stored.copy()
    for at, packed in _WRITERS[type](quants):
        changed[:, at : at + packed.shape[1]] = packed
    return changed


def has_grid(type: TensorType) -> bool:
    return type in _READERS


Parts = tuple[Floats, Floats, npt.NDArray[Any]]


def _symmetric(scale: Floats, middle: int) -> Parts:
    return scale, np.zeros_like(scale), np.arange(2 * middle) - middle


def _read_q2_k(stored: Bytes) -> Parts:
    scales, mins = (stored[:, :16] & 15).astype(np.float32), (stored[:, :16] >> 4).astype(np.float32)
    return read_half(stored, 80) * scales, -read_half(stored, 82) * mins, np.arange(4)


def _read_q3_k(stored: Bytes) -> Parts:
    return _symmetric(read_half(stored, 108) * (scales_q3_k(stored[:, 96:108]).astype(np.float32) - 32), 4)


def _read_affine_k(stored: Bytes, num_levels: int) -> Parts:
    scales, mins = scales_and_mins(stored)
    return scales, -mins, np.arange(num_levels)


def _read_q6_k(stored: Bytes) -> Parts:
    return _symmetric(read_half(stored, 208) * stored[:, 192:208].view(np.int8).astype(np.float32), 32)


_READERS: dict[TensorType, Callable[[Bytes], Parts]] = {
    T.Q4_0: lambda stored: _symmetric(read_half(stored, 0), 8),
    T.Q5_0: lambda stored: _symmetric(read_half(stored, 0), 16),
    T.Q4_1: lambda stored: (read_half(stored, 0), read_half(stored, 2), np.arange(16)),
    T.Q5_1: lambda stored: (read_half(stored, 0), read_half(stored, 2), np.arange(32)),
    T.IQ4_NL: lambda stored: (read_half(stored, 0), np.zeros((len(stored), 1), np.float32), IQ4_NL_LEVELS),
    T.Q2_K: _read_q2_k,
    T.Q3_K: _read_q3_k,
    T.Q4_K: lambda stored: _read_affine_k(stored, 16),
    T.Q5_K: lambda stored: _read_affine_k(stored, 32),
    T.Q6_K: _read_q6_k,
}
# where which bits of the quants go
_WRITERS: dict[TensorType, Callable[[Bytes], tuple[tuple[int, Bytes], ...]]] = {
    T.Q4_0: lambda q: ((2, pack_nibbles(q)),),
    T.IQ4_NL: lambda q: ((2, pack_nibbles(q)),),
    T.Q4_1: lambda q: ((4, pack_nibbles(q)),),
    T.Q5_0: lambda q: ((2, pack_bits(q >> 4)), (6, pack_nibbles(q & 15))),
    T.Q5_1: lambda q: ((4, pack_bits(q >> 4)), (8, pack_nibbles(q & 15))),
    T.Q2_K: lambda q: ((16, gather(q, 32, 2)),),
    T.Q3_K: lambda q: ((0, gather(q >> 2, 32, 1)), (32, gather(q & 3, 32, 2))),
    T.Q4_K: lambda q: ((16, gather(q, 32, 4)),),
    T.Q5_K: lambda q: ((16, gather(q >> 4, 32, 1)), (48, gather(q & 15, 32, 4))),
    T.Q6_K: lambda q: ((0, gather(q & 15, 64, 4)), (128, gather(q >> 4, 32, 2))),
}
