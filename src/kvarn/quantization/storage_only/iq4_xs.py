"""IQ4_XS: super-blocks of 256 values, eight blocks of 32 with 6-bit scales of one f16, on the levels of IQ4_NL.

The best scale of each block is that of the native search for IQ4_NL. The scales then get their common unit: the one of
llama.cpp, which makes the largest scale -32, improved by least squares on the codes that it leads to.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvarn.backends.native import _native
from kvarn.formats.block_quants import IQ4_NL_LEVELS, pack_nibbles
from kvarn.formats.weights import TensorType

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

REFITS = 3
_LEVELS = np.asarray(IQ4_NL_LEVELS, np.float32)
_MIDDLES = (_LEVELS[1:] + _LEVELS[:-1]) / 2
_CHUNK_BLOCKS = 1 << 12
_NONE = np.empty(0, np.float32)


def encode_iq4_xs(values: Float32, importance: Float32 | None, team: _native.ThreadTeam) -> Bytes:
    """Super-blocks of whole rows, flat; an error counts importance * sqrt(sigma^2 + x^2), x^2 without importance."""
    blocks, scales = values.reshape(-1, 8, 32), _block_scales(values, importance, team)
    weights = None if importance is None else np.broadcast_to(importance, values.shape).reshape(-1, 8, 32)
    out = np.empty((len(blocks), 136), np.uint8)
    for begin in range(0, len(blocks), _CHUNK_BLOCKS):
        some = slice(begin, begin + _CHUNK_BLOCKS)
        squares = np.square(blocks[some])
        weight = squares
        if weights is not None:
            weight = weights[some] * np.sqrt(2 * squares.mean(axis=(1, 2), keepdims=True) + squares)
        out[some] = _encode(blocks[some], weight, scales[some])
    return out.reshape(-1)


def _block_scales(values: Float32, importance: Float32 | None, team: _native.ThreadTeam) -> Float32:
    """(super-blocks, 8): the scale of each block of 32, found alone."""
    stored = np.empty(TensorType.IQ4_NL.num_bytes(values.size), np.uint8)
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    rows, columns = values.shape
    weights = _NONE if importance is None else importance
    _native.quantize(TensorType.F32.id, TensorType.IQ4_NL.id, rows, columns, raw, weights, stored, team)
    halves = stored.reshape(-1, TensorType.IQ4_NL.block_bytes)[:, :2]
    return np.ascontiguousarray(halves).view("<f2").astype(np.float32).reshape(-1, 8)


def _encode(blocks: Float32, weight: Float32, scales: Float32) -> Bytes:
    at = np.abs(scales).argmax(axis=1)[:, None]
    unit = _half(np.take_along_axis(scales, at, axis=1) / np.float32(-32))
    best = _Fit(blocks, weight, scales, unit)
    for _ in range(REFITS):
        fitted = _Fit(blocks, weight, best.own_scales, best.own_unit)
        best = best.where_better(fitted)
    return best.packed()


class _Fit:
    """Super-blocks on one unit: the factors -32 .. 31 nearest to the wanted scales, and the codes they lead to."""

    def __init__(self, blocks: Float32, weight: Float32, wanted: Float32, unit: Float32) -> None:
        self.unit = unit
        self.factors = np.clip(np.rint(wanted * _inverse(unit)), -32, 31).astype(np.float32)
        scales = unit * self.factors
        self.codes = np.searchsorted(_MIDDLES, blocks * _inverse(scales)[..., None]).astype(np.uint8)
        levels = _LEVELS[self.codes]
        by_level = (weight * blocks * levels).sum(axis=2)
        squares = (weight * levels * levels).sum(axis=2)
        self.own_scales: Float32 = np.divide(by_level, squares, out=scales.copy(), where=squares > 0)
        total = (self.factors * self.factors * squares).sum(axis=1, keepdims=True)
        least = np.divide((self.factors * by_level).sum(axis=1, keepdims=True), total, out=unit.copy(), where=total > 0)
        self.own_unit = _half(least)
        # The error of the values, without the part that no choice changes.
        self.error = (scales * scales * squares - 2 * scales * by_level).sum(axis=1)

    def where_better(self, other: _Fit) -> _Fit:
        """The better of two for each super-block."""
        is_better = other.error < self.error
        for name in ("unit", "factors", "codes", "own_scales", "own_unit", "error"):
            getattr(self, name)[is_better] = getattr(other, name)[is_better]
        return self

    def packed(self) -> Bytes:
        stored = (self.factors + 32).astype(np.uint8)
        low = (stored[:, ::2] & 15) | (stored[:, 1::2] & 15) << 4
        high = ((stored >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
        unit = self.unit.astype("<f2").view(np.uint8)
        codes = pack_nibbles(self.codes.reshape(-1, 32)).reshape(len(low), -1)
        return np.hstack([unit, high.astype("<u2")[:, None].view(np.uint8), low, codes])


def _half(values: npt.NDArray[np.floating]) -> Float32:
    return values.astype("<f2").astype(np.float32)


def _inverse(values: Float32) -> Float32:
    return np.divide(1, values, out=np.zeros_like(values), where=values != 0)
