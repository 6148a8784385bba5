"""Quantised super-blocks of 256 values: float16 d (and dmin), small integer scales for sub-blocks of 16 or 32.

    Q2_K  scales[16] | low[64] | d | dmin               d * (s & 15) * q - dmin * (s >> 4)       sub-blocks of 16
    Q3_K  high[32] | low[64] | scales[12] | d           d * (s - 32) * (q - 4)                   of 16
    Q4_K  d | dmin | scales[12] | q[128]                d * s * q - dmin * m                     of 32
    Q5_K  d | dmin | scales[12] | high[32] | q[128]     as Q4_K                                  of 32
    Q6_K  low[128] | high[64] | scales[16] | d          d * s * (q - 32)                         of 16

Bit planes are interleaved so that one vector load feeds several sub-blocks; with i = 0..31:
    low[64]   byte 32 h + i holds 2 bits of each of the values 128 h + 32 j + i, j = 0..3 (also Q6_K's high)
    high[32]  byte i holds 1 bit of each of the values 32 j + i, j = 0..7
    q[128]    byte 32 g + i holds 4 bits of each of the values 64 g + 32 j + i, j = 0..1
    low[128]  byte 64 h + i holds 4 bits of each of the values 128 h + 64 j + i, i = 0..63 (Q6_K)
Functions take and return (blocks, bytes) and (blocks, 256) arrays.
"""

from __future__ import annotations

import numpy as np

from kvarn.formats.block_quants import Bytes, Floats, half_bytes, inverse, peak, read_half, rounded, to_half


def decode_q2_k(stored: Bytes) -> Floats:
    packed = stored[:, :16]
    scales = read_half(stored, 80) * (packed & 15).astype(np.float32)
    mins = read_half(stored, 82) * (packed >> 4).astype(np.float32)
    return _affine(_spread(stored[:, 16:80], 32, 2), scales, mins)


def decode_q3_k(stored: Bytes) -> Floats:
    scales = read_half(stored, 108) * (scales_q3_k(stored[:, 96:108]).astype(np.float32) - 32)
    quants = _spread(stored[:, 32:96], 32, 2) | _spread(stored[:, :32], 32, 1) << 2
    return _scaled(quants.astype(np.float32) - 4, scales)


def decode_q4_k(stored: Bytes) -> Floats:
    scales, mins = scales_and_mins(stored)
    return _affine(_spread(stored[:, 16:], 32, 4), scales, mins)


def decode_q5_k(stored: Bytes) -> Floats:
    scales, mins = scales_and_mins(stored)
    quants = _spread(stored[:, 48:], 32, 4) | _spread(stored[:, 16:48], 32, 1) << 4
    return _affine(quants, scales, mins)


def decode_q6_k(stored: Bytes) -> Floats:
    scales = read_half(stored, 208) * stored[:, 192:208].view(np.int8).astype(np.float32)
    quants = _spread(stored[:, :128], 64, 4) | _spread(stored[:, 128:192], 32, 2) << 4
    return _scaled(quants.astype(np.float32) - 32, scales)


def encode_q2_k(values: Floats) -> Bytes:
    quants, scales, mins, halves = _fit_affine(values.reshape(-1, 16, 16), 3, 15)
    return np.hstack([scales | mins << 4, gather(quants, 32, 2), halves])


def encode_q3_k(values: Floats) -> Bytes:
    quants, scales, half = _fit_symmetric(values.reshape(-1, 16, 16), 4, 32)
    packed = _pack_scales_q3_k((scales + 32).astype(np.uint8))
    return np.hstack([gather(quants >> 2, 32, 1), gather(quants & 3, 32, 2), packed, half])


def encode_q4_k(values: Floats) -> Bytes:
    quants, scales, mins, halves = _fit_affine(values.reshape(-1, 8, 32), 15, 63)
    return np.hstack([halves, pack_scales_and_mins(scales, mins), gather(quants, 32, 4)])


def encode_q5_k(values: Floats) -> Bytes:
    quants, scales, mins, halves = _fit_affine(values.reshape(-1, 8, 32), 31, 63)
    packed = pack_scales_and_mins(scales, mins)
    return np.hstack([halves, packed, gather(quants >> 4, 32, 1), gather(quants & 15, 32, 4)])


def encode_q6_k(values: Floats) -> Bytes:
    quants, scales, half = _fit_symmetric(values.reshape(-1, 16, 16), 32, 128)
    low, high = gather(quants & 15, 64, 4), gather(quants >> 4, 32, 2)
    return np.hstack([low, high, scales.astype(np.int8).view(np.uint8), half])


def _spread(packed: Bytes, run: int, bits: int) -> Bytes:
    """Unpack fields of `bits` bits; the fields of a byte belong to values `run` apart, lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Bytes = packed.reshape(len(packed), -1, 1, run) >> shifts & (2**bits - 1)
    return fields.reshape(len(packed), 256)


def gather(quants: Bytes, run: int, bits: int) -> Bytes:
    """Pack fields: the inverse of _spread."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Bytes = quants.reshape(len(quants), -1, 8 // bits, run) << shifts
    packed: Bytes = np.bitwise_or.reduce(fields, axis=2)
    return packed.reshape(len(quants), -1)


def _affine(quants: Bytes, scales: Floats, mins: Floats) -> Floats:
    parts = quants.astype(np.float32).reshape(*scales.shape, -1)
    return (scales[..., None] * parts - mins[..., None]).reshape(len(quants), 256)


def _scaled(quants: Floats, scales: Floats) -> Floats:
    return (scales[..., None] * quants.reshape(*scales.shape, -1)).reshape(len(quants), 256)


def scales_and_mins(stored: Bytes) -> tuple[Floats, Floats]:
    """Q4_K and Q5_K: 8 scales and 8 minimums of 6 bits in bytes 4..15.

    Bytes 0..3 and 4..7 hold scales and minimums 0..3 in their low 6 bits; bytes 8..11 the low 4 bits of
    scales and minimums 4..7, whose upper 2 bits sit on top of bytes 0..3 and 4..7.
    """
    first, second, third = stored[:, 4:8], stored[:, 8:12], stored[:, 12:16]
    scales = np.hstack([first & 63, third & 15 | first >> 6 << 4])
    mins = np.hstack([second & 63, third >> 4 | second >> 6 << 4])
    return read_half(stored, 0) * scales.astype(np.float32), read_half(stored, 2) * mins.astype(np.float32)


def pack_scales_and_mins(scales: Bytes, mins: Bytes) -> Bytes:
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = mins[:, :4] | mins[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
    return np.hstack([first, second, third])


def scales_q3_k(packed: Bytes) -> Bytes:
    """Q3_K: 16 scales of 6 bits. Byte j < 8 holds the low 4 bits of j and j + 8; byte 8 + j the upper 2 bits
    of j, j + 4, j + 8 and j + 12."""
    low = np.hstack([packed[:, :8] & 15, packed[:, :8] >> 4])
    high = np.hstack([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)])
    scales: Bytes = low | high << 4
    return scales


def _pack_scales_q3_k(scales: Bytes) -> Bytes:
    low = scales[:, :8] & 15 | (scales[:, 8:] & 15) << 4
    high = np.bitwise_or.reduce([scales[:, 4 * i : 4 * i + 4] >> 4 << 2 * i for i in range(4)])
    return np.hstack([low, high])


def _fit_affine(parts: Floats, max_quant: int, max_scale: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Quants, scales, minimums and the bytes of d and dmin, for values ~ d * scale * q - dmin * minimum."""
    low = -np.minimum(parts.min(axis=2), 0)
    step = (parts.max(axis=2).clip(0) + low) / np.float32(max_quant)
    d = to_half(step.max(axis=1, keepdims=True) / max_scale)
    dmin = to_half(low.max(axis=1, keepdims=True) / max_scale)
    scales = rounded(step * inverse(d), 0, max_scale)
    mins = rounded(low * inverse(dmin), 0, max_scale)
    shifted = parts + (dmin * mins)[..., None]
    quants = rounded(shifted * inverse(d * scales)[..., None], 0, max_quant)
    return quants.reshape(-1, 256), scales, mins, np.hstack([half_bytes(d), half_bytes(dmin)])


def _fit_symmetric(parts: Floats, middle: int, max_scale: int) -> tuple[Bytes, Floats, Bytes]:
    """Quants, signed scales and the bytes of d, for values ~ d * scale * (q - middle).

    The largest magnitude of a sub-block maps to q = 0, which lies one step further out than the largest q.
    """
    step = peak(parts)[..., 0] / -middle
    d = to_half(peak(step) / -max_scale)
    scales = np.rint(step * inverse(d)).clip(-max_scale, max_scale - 1)
    quants = rounded(parts * inverse(d * scales)[..., None] + middle, 0, 2 * middle - 1)
    return quants.reshape(-1, 256), scales, half_bytes(d)
