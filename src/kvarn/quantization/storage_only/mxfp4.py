"""MXFP4: 32 E2M1 values and a power of two. Without importance llama.cpp's bytes; with it the best of three powers.

A block is e and 16 bytes of codes, the first 16 values in their low halves; a value is code / 2 * 2^(e - 127).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_MIDDLES = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
_LARGEST_EXPONENT = 2  # of 6
_BIAS, _MOST = 127, 254
_CHUNK_BLOCKS = 1 << 15


def encode_mxfp4(values: Float32, importance: Float32 | None) -> Bytes:
    """Blocks of whole rows, flat."""
    blocks = values.reshape(-1, 32)
    weights = None if importance is None else np.broadcast_to(importance, values.shape).reshape(-1, 32)
    out = np.empty((len(blocks), 17), np.uint8)
    for begin in range(0, len(blocks), _CHUNK_BLOCKS):
        some = slice(begin, begin + _CHUNK_BLOCKS)
        out[some] = _encode(blocks[some], None if weights is None else weights[some])
    return out.reshape(-1)


def _encode(blocks: Float32, weights: Float32 | None) -> Bytes:
    peaks = np.abs(blocks).max(axis=1)
    exponents = np.frexp(peaks)[1] - 1 - _LARGEST_EXPONENT + _BIAS
    plain = np.where(peaks > 0, exponents, 0).clip(0, _MOST)
    if weights is None:
        return _packed(blocks, plain)
    choices = [np.clip(plain + step, 0, _MOST) for step in (0, -1, 1)]
    errors = np.stack([(weights * np.square(_nearest(blocks, e)[1] - blocks)).sum(axis=1) for e in choices])
    return _packed(blocks, np.take_along_axis(np.stack(choices), errors.argmin(axis=0)[None], axis=0)[0])


def _nearest(blocks: Float32, exponents: npt.NDArray[np.int_]) -> tuple[Bytes, Float32]:
    """Codes and their values; of two codes equally near the smaller."""
    scales = np.ldexp(np.float32(1), exponents - _BIAS)[:, None]
    codes = np.searchsorted(_MIDDLES, np.abs(blocks) / scales).astype(np.uint8)
    values = MAGNITUDES[codes] * scales
    is_negative = (blocks < 0) & (codes > 0)
    return codes | (is_negative * np.uint8(8)), np.where(is_negative, -values, values)


def _packed(blocks: Float32, exponents: npt.NDArray[np.int_]) -> Bytes:
    codes, _ = _nearest(blocks, exponents)
    return np.hstack([exponents[:, None].astype(np.uint8), codes[:, :16] | codes[:, 16:] << 4])
