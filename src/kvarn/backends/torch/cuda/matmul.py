"""x @ weight.T on a GPU with one arithmetic: every output is one ascending chain over the inner dimension, in float32.

The matrix unit's chain is the same for every tile and every number of rows, so a row's bits do not depend on the rows
beside it. What is added or gated afterwards works on the product as it was rounded to the weights' type.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvarn.backends.torch.cuda.dependent import IS_ABLE, LAUNCH, LINE_BYTES, prefetch_rows, wait_for_inputs

GROUP = 8  # tiles of rows that share their weights in the cache


class Epilogue(IntEnum):
    """What becomes of the product."""

    STORE = 0
    ADD = 1  # to what `out` holds
    SILU_GATED = 2  # the weight holds the gate's rows, then up's: silu(gate) * up


@dataclass(frozen=True, slots=True)
class Tiling:
    """Shape of one program's tile; is_tall: the weights are the tall operand, for few rows; is_copied: they come
    through the copy engine."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    is_tall: bool
    is_copied: bool = False

    def can_compute(self, weight: Tensor, epilogue: Epilogue) -> bool:
        """Whether it is made for such a matrix and fits."""
        num_matrices = 2 if epilogue is Epilogue.SILU_GATED else 1
        is_whole = len(weight) // num_matrices % self.columns == 0 and weight.shape[1] % self.depth == 0
        return self.fits(weight.element_size(), num_matrices) and (is_whole and IS_ABLE if self.is_copied else True)

    def fits(self, element_size: int, num_matrices: int) -> bool:
        """Whether its buffers fit into shared memory, and its sums into registers."""
        sums = num_matrices * self.rows * self.columns / (self.warps * 32)
        return self.buffers(element_size, num_matrices) <= MAX_SHARED and sums <= MAX_SUMS

    def buffers(self, element_size: int, num_matrices: int) -> int:
        """Bytes of shared memory."""
        return (self.rows + num_matrices * self.columns) * self.depth * element_size * self.stages

    def prefetched(self, element_size: int) -> int:
        """Lines of each row of weights that are asked for ahead of the rest: a power of two; only few rows wait for
        their weights rather than for arithmetic."""
        lines = self.depth * element_size * (self.stages - 1) // LINE_BYTES
        return 1 << (lines.bit_length() - 1) if self.is_tall and lines else 0


MAX_SHARED = 225 * 1024
MAX_SUMS = 130  # per thread
TILINGS = (
    Tiling(16, 64, 128, 6, 4, is_tall=True),
    Tiling(32, 64, 128, 5, 4, is_tall=True),
    Tiling(64, 64, 128, 4, 4, is_tall=True),
    Tiling(128, 128, 64, 4, 8, is_tall=False),
)


def default_tiling(rows: int, epilogue: Epilogue, element_size: int) -> Tiling:
    """A tiling that works everywhere; choose.py finds faster ones."""
    tiling = next((one for one in TILINGS if rows <= one.rows), TILINGS[-1])
    return fitting(tiling, element_size, 2 if epilogue is Epilogue.SILU_GATED else 1)


def fitting(tiling: Tiling, element_size: int, num_matrices: int) -> Tiling:
    """The tiling with as many stages, and as much depth, as fit."""
    while not tiling.fits(element_size, num_matrices):
        tiling = (
            replace(tiling, stages=tiling.stages - 1) if tiling.stages > 2 else replace(tiling, depth=tiling.depth // 2)
        )
    return tiling


def multiply(
    x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue = Epilogue.STORE, tiling: Tiling | None = None
) -> Tensor:
    """out = x (rows, in) @ weight (out, in).T, or what the epilogue makes of it; out's type may be wider than x's."""
    _launch(x, weight, out, epilogue, tiling or default_tiling(len(x), epilogue, x.element_size()), is_warmup=False)
    return out


def compile_products(wanted: Iterable[tuple[Tensor, Tensor, Tensor, Epilogue, Tiling]]) -> None:
    """Compile for these arguments of multiply, several at a time; computes nothing."""
    if not hasattr(triton, "AsyncCompileMode"):
        return
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        for one in wanted:
            _launch(*one, is_warmup=True)


def _launch(x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue, tile: Tiling, *, is_warmup: bool) -> None:
    rows, depth = x.shape
    columns = len(weight) // 2 if epilogue is Epilogue.SILU_GATED else len(weight)
    element_size = x.element_size()
    copied = None
    if tile.is_copied:
        copied = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [tile.columns, tile.depth])
    _matmul_kernel.run(
        x, weight, copied, out, rows, columns, x.stride(0), weight.stride(0), out.stride(0),
        DEPTH=depth, ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.depth, STAGES=tile.stages, IS_TALL=tile.is_tall,
        GROUPED=GROUP, IS_EVEN=depth % tile.depth == 0 and columns % tile.columns == 0, EPILOGUE=int(epilogue),
        PREFETCHED=tile.prefetched(element_size) if LAUNCH["DEPENDENT"] else 0,
        num_warps=tile.warps, grid=(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),),
        warmup=is_warmup, **LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x, weight, copied, out, rows, columns, x_row, weight_row, out_row,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    IS_TALL: tl.constexpr, GROUPED: tl.constexpr, IS_EVEN: tl.constexpr, EPILOGUE: tl.constexpr,
    PREFETCHED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    PRECISION: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    tiles_m = tl.cdiv(rows, ROWS)
    tiles_n = tl.cdiv(columns, COLUMNS)
    t = tl.program_id(0)
    per_group = GROUPED * tiles_n
    first = t // per_group * GROUPED
    size = tl.minimum(tiles_m - first, GROUPED)
    m = (first + (t % per_group) % size) * ROWS + tl.arange(0, ROWS)
    n_first = ((t % per_group) // size) * COLUMNS
    n = n_first + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP)
    x_at = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * weight_row + k[None, :]
    up_at = w_at + columns.to(tl.int64) * weight_row
    if IS_TALL:
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        up_total = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        up_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PREFETCHED > 0:  # weights do not depend on the kernel before
        prefetch_rows(weight, n, columns, weight_row, PREFETCHED)
        if EPILOGUE == 2:
            prefetch_rows(weight + columns.to(tl.int64) * weight_row, n, columns, weight_row, PREFETCHED)
    wait_for_inputs(DEPENDENT)
    for at in tl.range(0, DEPTH, STEP, num_stages=STAGES):
        x_inside = (m < rows)[:, None] if IS_EVEN else (m < rows)[:, None] & (at + k < DEPTH)[None, :]
        inside = (n < columns)[:, None] & (at + k < DEPTH)[None, :]
        w_tile = _weights(w_at, copied, n_first, at, inside, IS_EVEN)
        x_tile = tl.load(x_at + at, mask=x_inside, other=0.0)
        if IS_TALL:
            total = tl.dot(w_tile, x_tile.T, total, input_precision=PRECISION)
        else:
            total = tl.dot(x_tile, w_tile.T, total, input_precision=PRECISION)
        if EPILOGUE == 2:
            up_tile = _weights(up_at, copied, columns + n_first, at, inside, IS_EVEN)
            if IS_TALL:
                up_total = tl.dot(up_tile, x_tile.T, up_total, input_precision=PRECISION)
            else:
                up_total = tl.dot(x_tile, up_tile.T, up_total, input_precision=PRECISION)
    if IS_TALL:
        to = out + m.to(tl.int64)[None, :] * out_row + n[:, None]
        inside = (m < rows)[None, :] & (n < columns)[:, None]
    else:
        to = out + m.to(tl.int64)[:, None] * out_row + n[None, :]
        inside = (m < rows)[:, None] & (n < columns)[None, :]
    if EPILOGUE == 1:
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(to, mask=inside, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate / (1 + tl.exp(-gate)) * up_total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weights(pointers, copied, first, at, inside, IS_EVEN: tl.constexpr):
    """A tile of a matrix from row `first` and column `at` on."""
    if copied is not None:
        return copied.load([first, at])
    elif IS_EVEN:  # noqa: RET505 - the compiler leaves out the other branches
        return tl.load(pointers + at)
    else:
        return tl.load(pointers + at, mask=inside, other=0.0)
