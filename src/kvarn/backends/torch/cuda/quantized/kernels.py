"""Triton kernels over packed matrices (pack.py): their product with rows, and their values.

A tile of weights is unpacked in registers to the very value that dequantising and rounding to bfloat16 gives, and goes
through the same ascending chain of sums as in cuda/matmul.py: the same bits. Integers become floats by standing in the
mantissa of 2^23, wherever they stand there: what that multiplies them by is taken out of the scale. Both are exact, and
so is every product of scale and integer (at most 23 bits): only the minimum's subtraction rounds. The bits of 2^23 come
from memory, since a constant costs another instruction for each value, and an argument a detour over shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a column's scales are, as in pack.py.
HALF = tl.constexpr(0)  # a float16 for 32 values
HALF_AND_MIN = tl.constexpr(1)  # two float16, scale and minimum
SIX_BITS = tl.constexpr(2)  # a scale and a minimum of 6 bits for 32 values, two float16 for 256
INT8 = tl.constexpr(3)  # an int8 for 16 values, a float16 for 256


@triton.jit
def _half(word, UPPER: tl.constexpr):
    bits = (word >> 16 if UPPER else word).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _six_bits(word, two_23, AT: tl.constexpr, UNIT: tl.constexpr):
    """Byte AT of a word, below 64, times UNIT."""
    if AT == 3:
        return (word >> 24 | two_23).to(tl.float32, bitcast=True) * UNIT - 8388608.0 * UNIT
    SMALL: tl.constexpr = UNIT / (1 << AT * 8)
    return (word & (63 << AT * 8) | two_23).to(tl.float32, bitcast=True) * SMALL - 8388608.0 * SMALL


@triton.constexpr_function
def _unit(INDEX, BITS):
    """1 / what the integers of a group are multiplied by where they stand."""
    if BITS == 8:
        return 1.0 / (1 << INDEX % 2 * 8)
    if BITS == 4:
        return 1.0 / (1 << (4 * INDEX if INDEX < 5 else 4 * (INDEX - 5)))
    return 1.0


@triton.jit
def _quants(low, high, two_23, INDEX: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """The integers of group INDEX of 32, exact in float32, times 1 / _unit()."""
    if BITS == 8:
        word = low if INDEX < 4 else high
        word = word if INDEX % 4 < 2 else word >> 16
        bits = word & (255 << INDEX % 2 * 8)
    elif BITS == 4:
        AT: tl.constexpr = 4 * INDEX if INDEX < 5 else 4 * (INDEX - 5)
        bits = (low if INDEX < 5 else low >> 20) & (15 << AT)
    else:
        WIDTH: tl.constexpr = BITS - 4
        more = high.to(tl.int32)
        more = more >> (WIDTH * INDEX - 4) if WIDTH * INDEX > 4 else more << (4 - WIDTH * INDEX)
        bits = ((low >> 4 * INDEX) & 15) | (more & (((1 << WIDTH) - 1) << 4))
    OFFSET: tl.constexpr = 8388608.0 + ZERO / _unit(INDEX, BITS)
    return (bits | two_23[:, None]).to(tl.float32, bitcast=True) - OFFSET


@triton.jit
def _group(
    low, high, two_23, scales, row, inside,
    G: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr, IS_EVEN: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Group G of a tile of 256 values: (columns, 32), or (columns, 16) of types with a scale for 16."""
    INDEX: tl.constexpr = G // 2 if SCALES == INT8 else G
    UNIT: tl.constexpr = _unit(INDEX, BITS)
    quants = _quants(low, high, two_23, INDEX, BITS, ZERO)
    if SCALES == HALF:
        word = _word(scales + G // 2 * row, inside, IS_EVEN)
        values = quants * (_half(word, G % 2 == 1) * UNIT)[:, None]
    elif SCALES == HALF_AND_MIN:
        word = _word(scales + G * row, inside, IS_EVEN)
        values = quants * (_half(word, False) * UNIT)[:, None] + _half(word, True)[:, None]
    elif SCALES == SIX_BITS:
        word = _word(scales + G // 4 * row, inside, IS_EVEN)
        least = _word(scales + (2 + G // 4) * row, inside, IS_EVEN)
        both = _word(scales + 4 * row, inside, IS_EVEN)
        scale = _half(both, False) * _six_bits(word, two_23, G % 4, UNIT)
        values = quants * scale[:, None] - (_half(both, True) * _six_bits(least, two_23, G % 4, 1.0))[:, None]
    else:
        word = _word(scales + G // 4 * row, inside, IS_EVEN)
        both = _word(scales + 4 * row, inside, IS_EVEN)
        values = quants * (_half(both, False) * (word << (24 - G % 4 * 8) >> 24).to(tl.float32))[:, None]
    return values.to(TYPE)


@triton.jit
def _word(at, inside, IS_EVEN: tl.constexpr):
    return tl.load(at) if IS_EVEN else tl.load(at, mask=inside, other=0)


@triton.jit
def _plane(at, inside, IS_EVEN: tl.constexpr):
    return tl.load(at) if IS_EVEN else tl.load(at, mask=inside[:, None], other=0)


@triton.jit(do_not_specialize=["rows", "tiles"])
def multiply_kernel(
    x, low, high, scales, out, rows, columns, tiles, depth, x_row, scale_row, out_row,
    BITS: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, IS_EVEN: tl.constexpr, IS_WHOLE: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = x.dtype.element_ty
    SCALE_WORDS: tl.constexpr = 4 if SCALES == HALF else (8 if SCALES == HALF_AND_MIN else 5)
    GROUP: tl.constexpr = 16 if SCALES == INT8 else 32
    tiles_m = tl.cdiv(rows, ROWS)
    m = tl.program_id(0) % tiles_m * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // tiles_m * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, GROUP)
    inside = n < columns
    words = n.to(tl.int64)[:, None] * (tiles * 32) + k[None, :]
    x_at = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    up = columns.to(tl.int64) * (tiles * 32)
    two_23 = _word(scales + tiles * SCALE_WORDS * scale_row + n, inside, IS_EVEN)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up_total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for t in tl.range(0, tiles, num_stages=STAGES):
        scales_at = scales + t * SCALE_WORDS * scale_row + n
        for G in tl.static_range(256 // GROUP):
            at = t * 256 + G * GROUP
            half = t * 32 + (G % 2 * 16 if GROUP == 16 else 0)
            mask = (m < rows)[:, None] if IS_WHOLE else (m < rows)[:, None] & (at + k < depth)[None, :]
            x_tile = tl.load(x_at + at, mask=mask, other=0.0).T
            low_tile = _plane(low + words + half, inside, IS_EVEN)
            high_tile = low_tile if BITS == 4 else _plane(high + words + half, inside, IS_EVEN)
            tile = _group(
                low_tile, high_tile, two_23, scales_at, scale_row, inside, G, BITS, ZERO, SCALES, IS_EVEN, TYPE
            )
            total = tl.dot(tile, x_tile, total)
            if EPILOGUE == 2:
                low_tile = _plane(low + words + up + half, inside, IS_EVEN)
                high_tile = low_tile if BITS == 4 else _plane(high + words + up + half, inside, IS_EVEN)
                tile = _group(
                    low_tile, high_tile, two_23, scales_at + columns, scale_row, inside, G, BITS, ZERO, SCALES,
                    IS_EVEN, TYPE,
                )  # fmt: skip
                up_total = tl.dot(tile, x_tile, up_total)
    to = out + m.to(tl.int64)[None, :] * out_row + n[:, None]
    stored = (m < rows)[None, :] & inside[:, None]
    if EPILOGUE == 1:
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(to, mask=stored, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate / (1 + tl.exp(-gate)) * up_total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["count", "first", "tiles"])
def values_kernel(
    ids, low, high, scales, out, count, first, tiles, depth, scale_row, out_row,
    BITS: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """The values of `count` columns, those of ids or those from `first` on: one tile of 256 values of some of them."""
    TYPE: tl.constexpr = out.dtype.element_ty
    SCALE_WORDS: tl.constexpr = 4 if SCALES == HALF else (8 if SCALES == HALF_AND_MIN else 5)
    to = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.program_id(1)
    GROUP: tl.constexpr = 16 if SCALES == INT8 else 32
    k = tl.arange(0, GROUP)
    inside = to < count
    n = (tl.load(ids + to, mask=inside, other=0) if HAS_IDS else first + to).to(tl.int64)
    scales_at = scales + t * SCALE_WORDS * scale_row + n
    two_23 = tl.load(scales + tiles * SCALE_WORDS * scale_row + n, mask=inside, other=0)
    for G in tl.static_range(256 // GROUP):
        words = n[:, None] * (tiles * 32) + t * 32 + (G % 2 * 16 if GROUP == 16 else 0) + k[None, :]
        low_tile = _plane(low + words, inside, False)
        high_tile = low_tile if BITS == 4 else _plane(high + words, inside, False)
        tile = _group(low_tile, high_tile, two_23, scales_at, scale_row, inside, G, BITS, ZERO, SCALES, False, TYPE)
        at = t * 256 + G * GROUP + k
        tl.store(
            out + to.to(tl.int64)[:, None] * out_row + at[None, :], tile, mask=inside[:, None] & (at < depth)[None, :]
        )
