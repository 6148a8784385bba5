"""Products of packed matrices (pack.py) with one row: words go from memory to registers, and nowhere else.

A warp takes 16 columns and a piece of the inner dimension, the warps of a program the pieces side by side; they are
added from left to right, so the bits are those of kernels.py. Of a gated product the 16 are 8 of gate and 8 of up. Each
thread holds four neighbouring values of a column, where the matrix unit's instruction would have two and two: it adds
sixteen products at once, whatever their order (where a unit does not, the comparison before a pick finds it out). The
instruction stands in PTX, since no layout of the compiler's says that.
"""

# Tuples of the kernels grow while they are compiled.
# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvarn.backends.torch.cuda.dependent import LAUNCH
from kvarn.backends.torch.cuda.matmul import Epilogue
from kvarn.backends.torch.cuda.quantized.pack import PIECE, PackedMatrix
from kvarn.backends.torch.cuda.quantized.ptx import chunk_program, shuffle_program

COLUMNS = 16
MAX_X_BYTES = 64 << 10  # of shared memory
TILE = gl.constexpr(256)  # values of a column that are loaded at a time
TILES = gl.constexpr(4)  # of those in a piece
CHUNKS = gl.constexpr(64)  # of sixteen values in a piece


@dataclass(frozen=True, slots=True)
class OneRowTiling:
    """warps: pieces computed side by side; registers: of a thread at most; ahead: tiles loaded before they are
    computed; is_early: the first of them before the kernel before has ended."""

    warps: int
    registers: int
    ahead: int = 1
    is_early: bool = True

    def fits(self, matrix: PackedMatrix, epilogue: Epilogue, num_rows: int) -> bool:  # noqa: ARG002  # as PackedTiling's
        """Whether there are whole tiles, columns and pieces to divide, and x fits into shared memory."""
        columns, depth = matrix.shape
        is_whole = depth % TILE.value == 0 and columns % COLUMNS == 0
        is_held = triton.next_power_of_2(self.rounds(depth)) * self.warps * PIECE * 2 <= MAX_X_BYTES
        is_used = self.warps <= triton.cdiv(depth, PIECE)
        return num_rows == 1 and matrix.packing.bits != 5 and is_whole and is_held and is_used

    def rounds(self, depth: int) -> int:
        """Pieces of one warp."""
        return -(-depth // (PIECE * self.warps))


@gluon.jit
def _load(at, is_there, IS_EVEN: gl.constexpr):
    return gl.load(at) if IS_EVEN else gl.load(at, mask=is_there, other=0)


@gluon.jit
def _load_tile(
    low, high, scales, tile, n, apart, t, all_columns, tiles,
    BITS: gl.constexpr, SEGMENT: gl.constexpr, PER_LOW: gl.constexpr, IS_EVEN: gl.constexpr,
):  # fmt: skip
    """Words, high words and scales of a tile of columns n and n + apart, each a tuple."""
    PER_COLUMN: gl.constexpr = SEGMENT // 4
    NUM_LOW: gl.constexpr = TILE // SEGMENT // PER_LOW
    is_there = tile < tiles
    words = ()
    for i in gl.static_range(NUM_LOW):
        at = low + ((tile * NUM_LOW + i) * all_columns + n) * PER_COLUMN + t
        for c in gl.static_range(SEGMENT // 16):
            words = words + (  # noqa: RUF005  # unpacking is not the compiler's
                _load(at + 4 * c, is_there, IS_EVEN), _load(at + 4 * c + apart * PER_COLUMN, is_there, IS_EVEN)
            )  # fmt: skip
    above = ()
    if BITS == 6:
        at = high + (tile * all_columns + n) * PER_COLUMN + t
        for c in gl.static_range(SEGMENT // 16):
            above = above + (  # noqa: RUF005
                _load(at + 4 * c, is_there, IS_EVEN), _load(at + 4 * c + apart * PER_COLUMN, is_there, IS_EVEN)
            )  # fmt: skip
    factors = ()  # each of four threads has every fourth segment's
    for s in gl.static_range(TILE // SEGMENT // 4):
        at = scales + (tile * (TILE // SEGMENT) + 4 * s + t) * all_columns + n
        factors = factors + (_load(at, is_there, IS_EVEN), _load(at + apart, is_there, IS_EVEN))  # noqa: RUF005
    _hold()
    return words, above, factors


@gluon.jit
def _hold():
    """Loads before it stay before it: the compiler would move them to where their values are used."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    nothing = gl.zeros([32 * gl.num_warps()], gl.int32, LANES)
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xFFFFFFFF; mov.b32 $0, $1;", "=r,r", [nothing], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _copy_x(x, depth, ROUNDS: gl.constexpr):
    """All of x to shared memory, as (chunks of a piece in all rounds, pieces of a round, 1, 4) x four values."""
    WARPS: gl.constexpr = gl.num_warps()
    COPIED: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    held = gl.allocate_shared_memory(
        gl.int64, [ROUNDS * CHUNKS, WARPS, 1, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    chunk = gl.arange(0, ROUNDS * CHUNKS, layout=gl.SliceLayout(1, COPIED))[:, None]
    place = gl.arange(0, WARPS * 4, layout=gl.SliceLayout(0, COPIED))[None, :]
    k = (chunk // CHUNKS * WARPS + place // 4) * (CHUNKS * 16) + chunk % CHUNKS * 16 + place % 4 * 4
    at = (x + k).to(gl.pointer_type(gl.int64), bitcast=True)
    flat = held._reinterpret(gl.int64, [ROUNDS * CHUNKS, WARPS * 4], FLAT)
    async_copy.async_copy_global_to_shared(flat, at, mask=k < depth)
    async_copy.commit_group()
    async_copy.wait_group(0)
    return held


@gluon.jit
def _load_x(held, chunk):
    """Sixteen values of x for each piece; all rows of the instruction are x, and one is stored."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    PLACES: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    every = held.index(chunk).load(PLACES) + gl.zeros([WARPS, 8, 4], gl.int64, PLACES)
    return gl.convert_layout(gl.reshape(every, [WARPS * 32]), LANES)


@gluon.jit
def _from_thread(value, THREAD: gl.constexpr):
    """What one of each four threads has, in all four."""
    IS_WIDE: gl.constexpr = value.dtype == gl.int64
    PROGRAM: gl.constexpr = shuffle_program(THREAD, IS_WIDE)
    KIND: gl.constexpr = "=l,l" if IS_WIDE else "=r,r"
    return gl.inline_asm_elementwise(PROGRAM, KIND, [value], dtype=value.dtype, is_pure=True, pack=1)


@gluon.jit
def _add_segment(
    sums, tile, x, chunk, S: gl.constexpr,
    BITS: gl.constexpr, ZERO: gl.constexpr, GROUP: gl.constexpr, SEGMENT: gl.constexpr, PER_LOW: gl.constexpr,
):  # fmt: skip
    """Segment S of a tile times x from `chunk` on, added to a thread's sums."""
    words, above, factors = tile
    scale = _from_thread(factors[S // 4 * 2], S % 4)
    other = _from_thread(factors[S // 4 * 2 + 1], S % 4)
    for i in gl.static_range(SEGMENT // 16):
        sums = _add_chunk(
            sums, words, above, scale, other, _load_x(x, chunk + i), S, i, BITS, ZERO, GROUP, SEGMENT, PER_LOW
        )
    return sums


@gluon.jit
def _add_chunk(
    sums, words, above, scale, other, x, S: gl.constexpr, C: gl.constexpr,
    BITS: gl.constexpr, ZERO: gl.constexpr, GROUP: gl.constexpr, SEGMENT: gl.constexpr, PER_LOW: gl.constexpr,
):  # fmt: skip
    """Sixteen values of each column: chunk C of segment S."""
    AT: gl.constexpr = 2 * (S // PER_LOW * (SEGMENT // 16) + C)
    HAS_MIN: gl.constexpr = scale.dtype == gl.int64
    PROGRAM: gl.constexpr = chunk_program(BITS, S % PER_LOW, S, C * 16 // GROUP, ZERO, HAS_MIN)
    TYPES: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
    SCALES: gl.constexpr = ",l,l" if HAS_MIN else ",r,r"
    if BITS == 6:
        return gl.inline_asm_elementwise(
            PROGRAM, "=f,=f,=f,=f,l,l,l,l" + SCALES + ",l,f,f,f,f",
            [words[AT], words[AT + 1], above[2 * C], above[2 * C + 1], scale, other, x,
             sums[0], sums[1], sums[2], sums[3]], dtype=TYPES, is_pure=True, pack=1,
        )  # fmt: skip
    return gl.inline_asm_elementwise(
        PROGRAM, "=f,=f,=f,=f,l,l" + SCALES + ",l,f,f,f,f",
        [words[AT], words[AT + 1], scale, other, x, sums[0], sums[1], sums[2], sums[3]],
        dtype=TYPES, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _finish(total, up, to, stored, out, EPILOGUE: gl.constexpr):
    """Store a product, or what the epilogue makes of it; as kernels.py does."""
    if EPILOGUE == 1:
        total = total.to(out.dtype.element_ty).to(gl.float32) + gl.load(to, mask=stored, other=0.0).to(gl.float32)
    if EPILOGUE == 2:
        gate = total.to(out.dtype.element_ty).to(gl.float32)
        total = gate / (1 + gl.exp(-gate)) * up.to(out.dtype.element_ty).to(gl.float32)
    gl.store(to, total.to(out.dtype.element_ty), mask=stored)


@gluon.jit
def _store_sums(held, out, first, ROUNDS: gl.constexpr, EPILOGUE: gl.constexpr):
    """Add the pieces of both columns from left to right and write what comes of them."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lane = gl.arange(0, 32, layout=LANES)
    one = gl.zeros([32], gl.float32, LANES)
    two = gl.zeros([32], gl.float32, LANES)
    for r in gl.static_range(ROUNDS):
        for w in gl.static_range(WARPS):
            one += held.index(2 * r).slice(w * 32, 32).load(LANES)
            two += held.index(2 * r + 1).slice(w * 32, 32).load(LANES)
    to = out + first + lane // 4
    _finish(one, two, to, lane % 4 == 0, out, EPILOGUE)
    if EPILOGUE != 2:
        _finish(two, two, to + 8, lane % 4 == 0, out, EPILOGUE)


@gluon.jit
def one_row_kernel(
    x, low, high, scales, out, columns, all_columns, tiles,
    BITS: gl.constexpr, ZERO: gl.constexpr, GROUP: gl.constexpr, SEGMENT: gl.constexpr, PER_LOW: gl.constexpr,
    AHEAD: gl.constexpr, ROUNDS: gl.constexpr, HELD_ROUNDS: gl.constexpr, IS_EVEN: gl.constexpr,
    EPILOGUE: gl.constexpr, IS_EARLY: gl.constexpr, IS_LATE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """IS_LATE: the kernel before does not write what this one reads, so it is waited for at the end."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, WARPS * 32, layout=LANES)
    t = thread % 4
    first = gl.program_id(0) * (8 if EPILOGUE == 2 else 16)
    apart = columns if EPILOGUE == 2 else 8
    n = first + thread % 32 // 4
    low = low.to(gl.pointer_type(gl.int64), bitcast=True)
    high = high.to(gl.pointer_type(gl.int64), bitcast=True)
    HAS_MIN: gl.constexpr = scales.dtype.element_ty == gl.int32
    scales = scales.to(gl.pointer_type(gl.int64 if HAS_MIN else gl.int32), bitcast=True)
    tile = thread // 32 * TILES
    if DEPENDENT and not IS_EARLY and not IS_LATE:
        gdc_wait()
        gdc_launch_dependents()
    loaded = ()
    for i in gl.static_range(AHEAD):
        loaded = loaded + (  # noqa: RUF005
            _load_tile(low, high, scales, tile + i, n, apart, t, all_columns, tiles, BITS, SEGMENT, PER_LOW, IS_EVEN),
        )
    if DEPENDENT and IS_EARLY and not IS_LATE:
        gdc_wait()
        gdc_launch_dependents()
    x_held = _copy_x(x, tiles * TILE, HELD_ROUNDS)
    sums_held = gl.allocate_shared_memory(
        gl.float32, [HELD_ROUNDS * 2, WARPS * 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    for r in range(ROUNDS):
        zero = gl.zeros([WARPS * 32], gl.float32, LANES)
        sums = (zero, zero, zero, zero)
        for i in gl.static_range(TILES):
            if i + AHEAD < TILES:
                following = _load_tile(
                    low, high, scales, tile + i + AHEAD, n, apart, t, all_columns, tiles, BITS, SEGMENT, PER_LOW,
                    IS_EVEN,
                )  # fmt: skip
            elif ROUNDS > 1:  # the next round's tiles; the last round's are not there
                following = _load_tile(
                    low, high, scales, tile + (WARPS - 1) * TILES + i + AHEAD, n, apart, t, all_columns, tiles,
                    BITS, SEGMENT, PER_LOW, False,
                )  # fmt: skip
            else:
                following = loaded[0]
            for s in gl.static_range(TILE // SEGMENT):
                chunk = r * CHUNKS + i * (TILE // 16) + s * (SEGMENT // 16)
                sums = _add_segment(sums, loaded[0], x_held, chunk, s, BITS, ZERO, GROUP, SEGMENT, PER_LOW)
            loaded = loaded[1:] + (following,)  # noqa: RUF005
        tile += WARPS * TILES
        sums_held.index(2 * r).store(sums[0])
        sums_held.index(2 * r + 1).store(sums[2])
    if DEPENDENT and IS_LATE:
        gdc_wait()
        gdc_launch_dependents()
    _store_sums(sums_held, out, first, ROUNDS, EPILOGUE)


def multiply_one_row(
    x: Tensor, matrix: PackedMatrix, out: Tensor, epilogue: Epilogue, tiling: OneRowTiling, *, is_late: bool = False,
    is_warmup: bool = False,
) -> Tensor:  # fmt: skip
    """As products.multiply_packed, of one row."""
    depth, packing, rounds = x.shape[1], matrix.packing, tiling.rounds(x.shape[1])
    one_row_kernel.run(
        x, matrix.low, matrix.low if matrix.high is None else matrix.high, matrix.scales, out,
        matrix.shape[0] // 2 if epilogue is Epilogue.SILU_GATED else matrix.shape[0], matrix.shape[0], matrix.tiles,
        BITS=packing.bits, ZERO=packing.zero, GROUP=packing.group, SEGMENT=packing.segment, PER_LOW=packing.per_low,
        AHEAD=tiling.ahead, ROUNDS=rounds, HELD_ROUNDS=triton.next_power_of_2(rounds),
        IS_EVEN=depth % (PIECE * tiling.warps) == 0, EPILOGUE=int(epilogue), IS_EARLY=tiling.is_early, IS_LATE=is_late,
        num_warps=tiling.warps, maxnreg=tiling.registers, grid=(matrix.shape[0] // COLUMNS,), warmup=is_warmup,
        **LAUNCH,
    )  # fmt: skip
    return out
