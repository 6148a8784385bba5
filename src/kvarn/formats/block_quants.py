"""Quantised blocks of 32 values with one float16 scale d (and minimum m):

    Q4_0    d | q[16]              d * (q - 8)          two values a byte: i in the low, i + 16 in the high bits
    Q4_1    d | m | q[16]          d * q + m
    Q5_0    d | high[4] | q[16]    d * (q - 16)         bit i of high is the fifth bit of value i
    Q5_1    d | m | high[4] | q[16]
    Q8_0    d | q[32]              d * q                signed bytes
    IQ4_NL  d | q[16]              d * IQ4_NL_VALUES[q]

Functions take and return (blocks, bytes) and (blocks, 32) arrays.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

# uint8 and float32 throughout; NumPy's annotations widen them in every expression.
Bytes = npt.NDArray[Any]
Floats = npt.NDArray[Any]

# The sixteen levels of IQ4_NL, in units of d: part of the format.
IQ4_NL_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_NL_LEVELS = np.array(IQ4_NL_VALUES, dtype=np.float32)
_MIDPOINTS = (IQ4_NL_LEVELS[1:] + IQ4_NL_LEVELS[:-1]) / 2


def decode_q4_0(stored: Bytes) -> Floats:
    return read_half(stored, 0) * (_nibbles(stored[:, 2:]).astype(np.float32) - 8)


def decode_q4_1(stored: Bytes) -> Floats:
    return read_half(stored, 0) * _nibbles(stored[:, 4:]).astype(np.float32) + read_half(stored, 2)


def decode_q5_0(stored: Bytes) -> Floats:
    quants: Bytes = _nibbles(stored[:, 6:]) | _bits(stored[:, 2:6]) << 4
    return read_half(stored, 0) * (quants.astype(np.float32) - 16)


def decode_q5_1(stored: Bytes) -> Floats:
    quants: Bytes = _nibbles(stored[:, 8:]) | _bits(stored[:, 4:8]) << 4
    return read_half(stored, 0) * quants.astype(np.float32) + read_half(stored, 2)


def decode_q8_0(stored: Bytes) -> Floats:
    return read_half(stored, 0) * stored[:, 2:].view(np.int8).astype(np.float32)


def decode_iq4_nl(stored: Bytes) -> Floats:
    return read_half(stored, 0) * IQ4_NL_LEVELS[_nibbles(stored[:, 2:])]


def encode_q4_0(values: Floats) -> Bytes:
    scale = to_half(peak(values) / -8)  # the largest magnitude becomes -8 exactly
    quants = rounded(values * inverse(scale) + 8, 0, 15)
    return np.hstack([half_bytes(scale), pack_nibbles(quants)])


def encode_q4_1(values: Floats) -> Bytes:
    scale, low = _scale_and_low(values, 15)
    quants = rounded((values - low) * inverse(scale), 0, 15)
    return np.hstack([half_bytes(scale), half_bytes(low), pack_nibbles(quants)])


def encode_q5_0(values: Floats) -> Bytes:
    scale = to_half(peak(values) / -16)
    quants = rounded(values * inverse(scale) + 16, 0, 31)
    return np.hstack([half_bytes(scale), pack_bits(quants >> 4), pack_nibbles(quants & 15)])


def encode_q5_1(values: Floats) -> Bytes:
    scale, low = _scale_and_low(values, 31)
    quants = rounded((values - low) * inverse(scale), 0, 31)
    return np.hstack([half_bytes(scale), half_bytes(low), pack_bits(quants >> 4), pack_nibbles(quants & 15)])


def encode_q8_0(values: Floats) -> Bytes:
    scale = to_half(np.abs(values).max(axis=1, keepdims=True) / 127)
    quants = np.rint(values * inverse(scale)).clip(-127, 127).astype(np.int8)
    return np.hstack([half_bytes(scale), quants.view(np.uint8)])


def encode_iq4_nl(values: Floats) -> Bytes:
    scale = to_half(peak(values) / -127)
    quants = np.searchsorted(_MIDPOINTS, values * inverse(scale)).astype(np.uint8)
    return np.hstack([half_bytes(scale), pack_nibbles(quants)])


def read_half(stored: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, as a column."""
    return stored[:, at : at + 2].view("<f2").astype(np.float32)


def to_half(values: Floats) -> Floats:
    """Round to float16, so that quants are chosen for the scale that is stored; never to infinity."""
    limit = np.finfo(np.float16).max
    return values.clip(-limit, limit).astype(np.float16).astype(np.float32)


def half_bytes(column: Floats) -> Bytes:
    """The bytes of a column of float16 values."""
    return column.astype("<f2").view(np.uint8)


def inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 where scale is 0."""
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def peak(values: Floats) -> Floats:
    """The value of largest magnitude along the last axis, with its sign."""
    where = np.abs(values).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(values, where, axis=-1)


def rounded(values: Floats, low: int, high: int) -> Bytes:
    """Round to whole numbers within 0 <= low and high <= 255."""
    return np.rint(values).clip(low, high).astype(np.uint8)


def _scale_and_low(values: Floats, steps: int) -> tuple[Floats, Floats]:
    low = to_half(values.min(axis=1, keepdims=True))
    scale = to_half((values.max(axis=1, keepdims=True) - low) / np.float32(steps))
    return scale, low


def _nibbles(packed: Bytes) -> Bytes:
    return np.hstack([packed & 15, packed >> 4])


def pack_nibbles(quants: Bytes) -> Bytes:
    packed: Bytes = quants[:, :16] | quants[:, 16:] << 4
    return packed


def _bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=1, bitorder="little")


def pack_bits(bits: Bytes) -> Bytes:
    return np.packbits(bits, axis=1, bitorder="little")
