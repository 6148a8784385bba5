"""ggml's IQ types: blocks of 256 values, groups of 8 (IQ1, IQ2) or 4 (IQ3) of which are entries of a grid.

    IQ1_S    d | low[32] | u16[8]: 4 x 3 high bits, 3 scale, 1 shift       d * (2 s + 1) * (grid +- 1/8)   groups of 32
    IQ1_M    low[32] | high[16] | u16[4]: 4 x 3 scale, 4 bits of d         as IQ1_S                        of 16
    IQ2_XXS  d | 8 x (entries[4], u32: 4 x 7 signs, 4 scale)               d / 8 * (2 s + 1) * +-grid      of 32
    IQ2_XS   d | u16[32]: 9 entry, 7 signs | scales[8]                     as IQ2_XXS                      of 16
    IQ2_S    d | low[32] | signs[32] | high[8] | scales[8]                 as IQ2_XXS                      of 16
    IQ3_XXS  d | entries[64] | u32[8]: 4 x 7 signs, 4 scale                d / 4 * (2 s + 1) * +-grid      of 32
    IQ3_S    d | low[64] | high[8] | signs[32] | scales[4]                 d * (2 s + 1) * +-grid          of 32
    IQ4_XS   d | u16: 8 x 2 high bits | low[4] | codes[128]                d * (s - 32) * level            of 32
Seven signs are those of the first values of eight; the eighth makes their number even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.formats.block_quants import IQ4_NL_VALUES, Bytes, Floats, read_half
from kvarn.formats.stored_types.integer_blocks import IntegerBlocks, Integers
from kvarn.formats.stored_types.iq_grids import Grid, grid

Words = npt.NDArray[Any]  # unsigned; NumPy's annotations widen them in every expression

_EVEN_SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)


def read_iq1_s(stored: Bytes) -> IntegerBlocks:
    high = stored[:, 34:].view("<u2").astype(np.uint32)
    entries = stored[:, 2:34] | _fields(high, (0, 3, 6, 9), 7) << 8
    shifts = np.where(high & 0x8000, -1, 1).astype(np.int8)
    integers = 8 * _entries("iq1", entries) + np.repeat(shifts, 32, axis=1)
    return IntegerBlocks(read_half(stored, 0) / 8, _odd(high >> 12 & 7), integers)


def read_iq1_m(stored: Bytes) -> IntegerBlocks:
    packed = stored[:, 48:].view("<u2").astype(np.uint32)
    bits = np.bitwise_or.reduce(packed >> 12 << np.array([0, 4, 8, 12], np.uint32), axis=1)
    d = bits.astype("<u2").view("<f2").astype(np.float32)[:, None]
    high = _fields(stored[:, 32:48], (0, 4), 15)
    integers = 8 * _entries("iq1", stored[:, :32] | (high & 7) << 8)
    shifts = np.where(high & 8, -1, 1).astype(np.int8)
    return IntegerBlocks(d / 8, _odd(_fields(packed, (0, 3, 6, 9), 7)), integers + np.repeat(shifts, 8, axis=1))


def read_iq2_xxs(stored: Bytes) -> IntegerBlocks:
    parts = stored[:, 2:].reshape(len(stored), 8, 8)
    words = np.ascontiguousarray(parts[..., 4:]).view("<u4").reshape(len(stored), 8)
    integers = _entries("iq2_xxs", parts[..., :4].reshape(len(stored), 32)) * _seven_signs(words)
    return IntegerBlocks(read_half(stored, 0) / 8, _odd(words >> 28), integers)


def read_iq2_xs(stored: Bytes) -> IntegerBlocks:
    words = np.ascontiguousarray(stored[:, 2:66]).view("<u2").astype(np.uint32)
    integers = _entries("iq2_xs", words & 511) * _signs(_EVEN_SIGNS[words >> 9])
    return IntegerBlocks(read_half(stored, 0) / 8, _odd(_fields(stored[:, 66:], (0, 4), 15)), integers)


def read_iq2_s(stored: Bytes) -> IntegerBlocks:
    entries = stored[:, 2:34] | _fields(stored[:, 66:74], (0, 2, 4, 6), 3) << 8
    integers = _entries("iq2_s", entries) * _signs(stored[:, 34:66])
    return IntegerBlocks(read_half(stored, 0) / 8, _odd(_fields(stored[:, 74:], (0, 4), 15)), integers)


def read_iq3_xxs(stored: Bytes) -> IntegerBlocks:
    words = np.ascontiguousarray(stored[:, 66:]).view("<u4")
    integers = _entries("iq3_xxs", stored[:, 2:66]) * _seven_signs(words)
    return IntegerBlocks(read_half(stored, 0) / 2, _odd(words >> 28), integers)


def read_iq3_s(stored: Bytes) -> IntegerBlocks:
    entries = stored[:, 2:66] | _fields(stored[:, 66:74], tuple(range(8)), 1) << 8
    integers = _entries("iq3_s", entries) * _signs(stored[:, 74:106])
    return IntegerBlocks(read_half(stored, 0), _odd(_fields(stored[:, 106:], (0, 4), 15)), integers)


def read_iq4_xs(stored: Bytes) -> IntegerBlocks:
    high = np.ascontiguousarray(stored[:, 2:4]).view("<u2").astype(np.uint32)
    scales = _fields(stored[:, 4:8], (0, 4), 15) | _fields(high, tuple(range(0, 16, 2)), 3) << 4
    packed = stored[:, 8:].reshape(len(stored), 8, 1, 16)  # of 32 codes, the first 16 are in the low halves
    codes = packed >> np.array([[0], [4]], np.uint8) & np.uint8(15)
    integers = np.array(IQ4_NL_VALUES, np.int8)[codes].reshape(len(stored), 256)
    return IntegerBlocks(read_half(stored, 0), scales.astype(np.float32) - 32, integers)


def _fields(packed: Words, shifts: tuple[int, ...], mask: int) -> Words:
    """Fields of each word, one after the other."""
    spread = packed.astype(np.uint32)[..., None] >> np.array(shifts, np.uint32) & np.uint32(mask)
    return spread.reshape(len(packed), -1)


def _odd(scales: Words) -> Floats:
    return (2 * scales + 1).astype(np.float32)


def _entries(name: Grid, numbers: Words) -> Integers:
    found: Integers = grid(name)[numbers].reshape(len(numbers), 256)
    return found


def _signs(bits: Bytes) -> Integers:
    """One bit for each value, lowest first; 1 is negative."""
    ones: Integers = np.unpackbits(np.ascontiguousarray(bits), axis=1, bitorder="little").astype(np.int8)
    return 1 - 2 * ones


def _seven_signs(words: Words) -> Integers:
    return _signs(_EVEN_SIGNS[_fields(words, (0, 7, 14, 21), 127)])
