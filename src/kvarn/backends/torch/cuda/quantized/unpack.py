"""Words of a packed matrix (pack.py) to its values in bfloat16, two at a time and all in one thread.

An integer below 128 becomes a float by standing in the mantissa of 128; what is too much is subtracted, which is exact.
Then one multiplication, or one fused with the minimum's addition, rounds. In PTX, since the compiler handles halves of
a register one by one; where kernels are interpreted, plain operations of float32 round twice, which is rarely another
value. A number in FP8 becomes one 2^120 times too small by standing in the lower bits of the exponent and the upper
ones of the mantissa, subnormal ones too; its scale makes up for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn.backends.torch.cuda.quantized.pack import E4M3

IS_PTX = tl.constexpr(not triton.knobs.runtime.interpret)
FLOAT8 = tl.constexpr(E4M3)


@triton.constexpr_function
def _program(BITS, SEGMENT, ZERO, HAS_MIN):
    """PTX for two values. Operands: result, low, high of types that have it, scales."""
    at = 3 if BITS in (5, 6) else 2
    lines = [".reg .b32 q, c, s, m;"]
    if ZERO == E4M3:
        lines += [f"shr.b32 q, $1, {SEGMENT % 2 * 8};", "shl.b32 c, q, 8;", "and.b32 c, c, 0x80008000;"]
        lines += ["shl.b32 q, q, 4;", "lop3.b32 q, q, 0x07F007F0, c, 0xEA;"]
    elif BITS == 8:  # the sign bit of a byte decides between 128 and 256, what is subtracted
        lines += [f"shr.b32 q, $1, {SEGMENT % 2 * 8};", "lop3.b32 c, q, 0x00800080, 0x43004300, 0xEA;"]
        lines += ["lop3.b32 q, q, 0x007F007F, 0x43004300, 0xEA;"]
    else:
        lines += [f"shr.b32 q, $1, {SEGMENT % 4 * 4};"]
        if BITS > 4:
            shift = SEGMENT % (16 // (BITS - 4)) * (BITS - 4) - 4
            lines += [f"shr.b32 c, $2, {shift};" if shift > 0 else f"shl.b32 c, $2, {-shift};"]
            lines += [f"lop3.b32 c, c, {((1 << BITS) - 16) * 0x10001}, 0x43004300, 0xEA;"]
            lines += ["lop3.b32 q, q, 0x000F000F, c, 0xEA;"]
        else:
            lines += ["lop3.b32 q, q, 0x000F000F, 0x43004300, 0xEA;"]
        lines += [f"mov.b32 c, {(0x4300 + ZERO) * 0x10001};"]
    if ZERO != E4M3:
        lines += ["sub.rn.bf16x2 q, q, c;"]
    if not HAS_MIN:
        return "{" + " ".join([*lines, f"mul.rn.bf16x2 $0, q, ${at};"]) + "}"
    lines += [f"prmt.b32 s, ${at}, ${at + 1}, 0x5410;", f"prmt.b32 m, ${at}, ${at + 1}, 0x7632;"]
    return "{" + " ".join([*lines, "fma.rn.bf16x2 $0, q, s, m;"]) + "}"


@triton.jit
def unpack(low, high, scales, SEGMENT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Segment SEGMENT of a tile: words (columns, values) int16 and scales (columns, groups) to bfloat16."""
    HAS_MIN: tl.constexpr = scales.dtype == tl.int32
    COLUMNS: tl.constexpr = low.shape[0]
    VALUES: tl.constexpr = low.shape[1]
    GROUPS: tl.constexpr = scales.shape[1]
    wide = tl.broadcast_to(scales[:, :, None], COLUMNS, GROUPS, VALUES // GROUPS)
    wide = tl.reshape(wide, COLUMNS, VALUES)
    if IS_PTX:
        PROGRAM: tl.constexpr = _program(BITS, SEGMENT, ZERO, HAS_MIN)
        WORDS: tl.constexpr = ",r,r" if HAS_MIN else ",r"
        if BITS == 5 or BITS == 6:  # noqa: PLR1714
            return tl.inline_asm_elementwise(
                PROGRAM, "=r,r,r" + WORDS, [low, high, wide], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        return tl.inline_asm_elementwise(
            PROGRAM, "=r,r" + WORDS, [low, wide], dtype=tl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip
    return _unpack_plainly(low, high, wide, SEGMENT, BITS, ZERO, HAS_MIN)


@triton.jit
def _unpack_plainly(
    low, high, wide, SEGMENT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, HAS_MIN: tl.constexpr
):  # fmt: skip
    if ZERO == FLOAT8:
        byte = low.to(tl.int32) >> SEGMENT % 2 * 8
        number = ((byte & 0x7F) << 20 | (byte & 0x80) << 24).to(tl.float32, bitcast=True)
        return (number * wide.to(tl.float32)).to(tl.bfloat16)
    if BITS == 8:
        quants = (low.to(tl.int32) << (24 - SEGMENT % 2 * 8)) >> 24
    else:
        quants = low.to(tl.int32) >> SEGMENT % 4 * 4 & 15
        if BITS > 4:
            WIDTH: tl.constexpr = BITS - 4
            quants |= (high.to(tl.int32) >> SEGMENT % (16 // WIDTH) * WIDTH & (1 << WIDTH) - 1) << 4
    quants = (quants - ZERO).to(tl.float32)
    if HAS_MIN:
        scale = (wide << 16).to(tl.float32, bitcast=True)
        least = (wide >> 16 << 16).to(tl.float32, bitcast=True)
        return (quants * scale + least).to(tl.bfloat16)
    return (quants * wide.to(tl.float32)).to(tl.bfloat16)
