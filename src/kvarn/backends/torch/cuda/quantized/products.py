"""Launches the kernels over packed matrices: products of few rows, and values for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvarn.backends.torch.cuda.matmul import Epilogue
from kvarn.backends.torch.cuda.quantized.kernels import multiply_kernel, values_kernel
from kvarn.backends.torch.cuda.quantized.pack import TILE, PackedMatrix

MAX_SUMS = 130  # per thread
MAX_SHARED = 225 * 1024
VALUE_COLUMNS = 32  # of one program of values_kernel


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """Shape of one program's tile; its depth is always a tile of 256 values."""

    rows: int
    columns: int
    stages: int
    warps: int

    def fits(self, bits: int, num_matrices: int) -> bool:
        """Whether its buffers fit into shared memory, its sums into registers, and its chain is the ascending one.

        Triton takes int8 operands of the smaller matrix instructions, which are those of fewer than four warps or 64
        columns, in another order of the inner dimension.
        """
        if bits == 5 and (self.warps % 4 or self.columns < 64):
            return False
        buffer = self.rows * TILE * 2 + num_matrices * self.columns * (bits * TILE // 8 + 32)
        sums = num_matrices * self.rows * self.columns / (self.warps * 32)
        return buffer * self.stages <= MAX_SHARED and sums <= MAX_SUMS


def multiply_packed(x: Tensor, matrix: PackedMatrix, out: Tensor, epilogue: Epilogue, tiling: PackedTiling) -> Tensor:
    """out = x (rows, depth) @ matrix.T, or what the epilogue makes of it; as matmul.multiply."""
    _launch(x, matrix, out, epilogue, tiling, is_warmup=False)
    return out


def compile_products(wanted: Iterable[tuple[Tensor, PackedMatrix, Tensor, Epilogue, PackedTiling]]) -> None:
    """Compile for these arguments of multiply_packed, several at a time; computes nothing."""
    if not hasattr(triton, "AsyncCompileMode"):
        return
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        for one in wanted:
            _launch(*one, is_warmup=True)


def _launch(
    x: Tensor, matrix: PackedMatrix, out: Tensor, epilogue: Epilogue, tiling: PackedTiling, *, is_warmup: bool
) -> None:
    rows, depth = x.shape
    columns = matrix.shape[0] // 2 if epilogue is Epilogue.SILU_GATED else matrix.shape[0]
    packing = matrix.packing
    grid = (triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns),)
    multiply_kernel.run(
        x, matrix.low, matrix.low if matrix.high is None else matrix.high, matrix.scales, out,
        rows, columns, matrix.tiles, depth, x.stride(0), matrix.shape[0], out.stride(0),
        BITS=packing.bits, ZERO=packing.zero, SCALES=packing.scales, ROWS=tiling.rows, COLUMNS=tiling.columns,
        STAGES=tiling.stages, IS_EVEN=columns % tiling.columns == 0, IS_WHOLE=depth % TILE == 0,
        EPILOGUE=int(epilogue), num_warps=tiling.warps, grid=grid, warmup=is_warmup,
    )  # fmt: skip


def write_values(matrix: PackedMatrix, out: Tensor, first: int = 0, ids: Tensor | None = None) -> Tensor:
    """The values of as many columns as out has rows: those of ids, or those from `first` on."""
    packing, grid = matrix.packing, (triton.cdiv(len(out), VALUE_COLUMNS), matrix.tiles)
    if len(out):
        values_kernel[grid](
            matrix.low if ids is None else ids, matrix.low, matrix.low if matrix.high is None else matrix.high,
            matrix.scales, out, len(out), first, matrix.tiles, matrix.shape[1], matrix.shape[0], out.stride(0),
            BITS=packing.bits, ZERO=packing.zero, SCALES=packing.scales, COLUMNS=VALUE_COLUMNS,
            HAS_IDS=ids is not None, num_warps=4,
        )  # fmt: skip
    return out


def values(matrix: PackedMatrix, dtype: torch.dtype, first: int = 0, count: int | None = None) -> Tensor:
    """The values of some columns, in new memory."""
    count = matrix.shape[0] - first if count is None else count
    return write_values(matrix, torch.empty(count, matrix.shape[1], dtype=dtype, device=matrix.low.device), first)
