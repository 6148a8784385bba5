"""PTX of the kernel for one row (one_row.py), as text: what the compiler has no words for."""

from __future__ import annotations

from triton.experimental import gluon

from kvarn.backends.torch.cuda.quantized.pack import E4M3


@gluon.constexpr_function
def chunk_program(BITS, FIELD, HIGH_FIELD, GROUP, ZERO, HAS_MIN):
    """PTX: 16 columns and 16 values each, unpacked, times x, added to four sums of a thread.

    Operands: sums, words of both columns, high words of both where there are, scales of both, x, sums before.
    """
    words, scales = (4, 8 if BITS == 6 else 6)
    sums = scales + 3
    lines = [".reg .b32 w<4>, h<4>, x0, x1, c, s<2>, m<2>, z<2>;"]
    lines += [f"mov.b64 {{w{at}, w{at + 2}}}, ${words + at};" for at in range(2)]
    if BITS == 6:
        lines += [f"mov.b64 {{h{at}, h{at + 2}}}, ${words + 2 + at};" for at in range(2)]
    for at in range(2):
        if HAS_MIN:
            lines += [f"mov.b64 {{z0, z1}}, ${scales + at};", f"prmt.b32 s{at}, z{GROUP}, z{GROUP}, 0x1010;"]
            lines += [f"prmt.b32 m{at}, z{GROUP}, z{GROUP}, 0x3232;"]
        else:
            halves = "0x3232" if GROUP else "0x1010"
            lines += [f"prmt.b32 s{at}, ${scales + at}, ${scales + at}, {halves};"]
    for at in range(4):
        lines += _unpacked(at, BITS, FIELD, HIGH_FIELD, ZERO)
        scaled = f"fma.rn.bf16x2 w{at}, w{at}, s{at % 2}, m{at % 2};"
        lines += [scaled if HAS_MIN else f"mul.rn.bf16x2 w{at}, w{at}, s{at % 2};"]
    lines += [f"mov.b64 {{x0, x1}}, ${scales + 2};"]
    lines += ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {w0, w1, w2, w3}, {x0, x1},"]
    lines += [f"{{${sums}, ${sums + 1}, ${sums + 2}, ${sums + 3}}};"]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _unpacked(at, BITS, FIELD, HIGH_FIELD, ZERO):
    """Lines that turn a pair of words into integers, as unpack.py does."""
    word = f"w{at}"
    shift = FIELD * (8 if BITS == 8 else 4)
    lines = [f"shr.b32 {word}, {word}, {shift};"] if shift else []
    if ZERO == E4M3:
        lines += [f"shl.b32 c, {word}, 8;", "and.b32 c, c, 0x80008000;", f"shl.b32 {word}, {word}, 4;"]
        return [*lines, f"lop3.b32 {word}, {word}, 0x07F007F0, c, 0xEA;"]
    if BITS == 8:
        lines += [f"lop3.b32 c, {word}, 0x00800080, 0x43004300, 0xEA;"]
        return [*lines, f"lop3.b32 {word}, {word}, 0x007F007F, 0x43004300, 0xEA;", f"sub.rn.bf16x2 {word}, {word}, c;"]
    if BITS == 6:
        high = 2 * HIGH_FIELD - 4
        lines += [f"shr.b32 c, h{at}, {high};" if high > 0 else f"shl.b32 c, h{at}, {-high};"]
        lines += ["lop3.b32 c, c, 0x00300030, 0x43004300, 0xEA;", f"lop3.b32 {word}, {word}, 0x000F000F, c, 0xEA;"]
    else:
        lines += [f"lop3.b32 {word}, {word}, 0x000F000F, 0x43004300, 0xEA;"]
    return [*lines, f"mov.b32 c, {(0x4300 + ZERO) * 0x10001};", f"sub.rn.bf16x2 {word}, {word}, c;"]


@gluon.constexpr_function
def shuffle_program(THREAD, IS_WIDE):
    """PTX: the value of one of each four threads, of four bytes or of eight."""
    one = f"shfl.sync.idx.b32 {{0}}, {{1}}, {THREAD}, 0x1C1F, 0xFFFFFFFF;"
    if not IS_WIDE:
        return one.format("$0", "$1")
    parts = one.format("a", "a") + " " + one.format("b", "b")
    return "{ .reg .b32 a, b; mov.b64 {a, b}, $1; " + parts + " mov.b64 $0, {a, b}; }"
