"""Launches the kernels over packed matrices: products, and values for a product of many rows."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Union

import torch
import triton
from torch import Tensor

from kvarn.backends.torch.cuda.dependent import LAUNCH
from kvarn.backends.torch.cuda.matmul import GROUP, MAX_SHARED, MAX_SUMS, Epilogue
from kvarn.backends.torch.cuda.quantized.kernels import multiply_kernel, pieces_kernel, values_kernel
from kvarn.backends.torch.cuda.quantized.pack import PIECE, PackedMatrix, Packing

try:
    from kvarn.backends.torch.cuda.quantized.one_row import OneRowTiling, multiply_one_row
except ImportError:  # an older Triton
    OneRowTiling = None  # type: ignore[assignment, misc]

VALUE_COLUMNS = 32  # of one program of values_kernel
NUM_SUMS, NUM_TILES = 1 << 23, 1 << 13  # of products whose pieces are computed side by side


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """Shape of one program's tile; run: pieces of one program, 0: all of them."""

    rows: int
    columns: int
    stages: int
    warps: int
    run: int = 0

    def fits(self, matrix: PackedMatrix, epilogue: Epilogue, num_rows: int) -> bool:
        """Whether its buffers fit into shared memory, its sums into registers, and there are pieces to divide."""
        num_matrices = 2 if epilogue is Epilogue.SILU_GATED else 1
        packing, pieces = matrix.packing, -(-matrix.shape[1] // PIECE)
        scales = packing.tile // packing.group * matrix.scales.element_size()
        weights = num_matrices * self.columns * (packing.bits * packing.tile // 8 + scales)
        sums = 2 * num_matrices * self.rows * self.columns / (self.warps * 32)
        is_divided = not self.run or (self.run < pieces and num_matrices == 1)
        is_small = (self.rows * packing.tile * 2 + weights) * self.stages <= MAX_SHARED
        return is_small and sums <= MAX_SUMS and is_divided and self._is_held(matrix, num_rows)

    def _is_held(self, matrix: PackedMatrix, num_rows: int) -> bool:
        """Whether scratch memory suffices for what programs leave."""
        tiles = triton.cdiv(matrix.shape[0], self.columns) * triton.cdiv(num_rows, self.rows)
        num_sums = tiles * self.columns * self.rows * triton.cdiv(matrix.shape[1], PIECE)
        return not self.run or (tiles <= NUM_TILES and num_sums <= NUM_SUMS)


AnyTiling = Union[PackedTiling, "OneRowTiling"]
ONE_ROW_TILINGS: tuple[AnyTiling, ...] = ()
if OneRowTiling is not None:
    ONE_ROW_TILINGS = tuple(OneRowTiling(*one) for one in ((4, 96), (4, 112), (2, 112), (4, 128, 3), (8, 96), (8, 112)))


@dataclass(frozen=True, slots=True)
class PieceSums:
    """Scratch memory for the sums of pieces, and how many programs of a tile have left theirs; for one product."""

    sums: Tensor
    finished: Tensor

    @classmethod
    def new(cls, device: torch.device) -> PieceSums:
        sums = torch.empty(NUM_SUMS, device=device)
        return cls(sums, torch.zeros(NUM_TILES, dtype=torch.int32, device=device))


def multiply_any(
    x: Tensor, matrix: PackedMatrix, out: Tensor, epilogue: Epilogue, tiling: AnyTiling, scratch: PieceSums,
    *, is_late: bool = False,
) -> Tensor:  # fmt: skip
    """As multiply_packed, by the kernel that the tiling is one of."""
    if isinstance(tiling, PackedTiling):
        return multiply_packed(x, matrix, out, epilogue, tiling, scratch, is_late=is_late)
    return multiply_one_row(x, matrix, out, epilogue, tiling, is_late=is_late)


def multiply_packed(
    x: Tensor, matrix: PackedMatrix, out: Tensor, epilogue: Epilogue, tiling: PackedTiling, scratch: PieceSums,
    *, is_late: bool = False,
) -> Tensor:  # fmt: skip
    """out = x (rows, depth) @ matrix.T, or what the epilogue makes of it; as matmul.multiply.

    is_late: the launch before this one reads x, too, writes neither x nor out, and has other scratch memory.
    """
    _launch(x, matrix, out, epilogue, tiling, scratch, is_late=is_late, is_warmup=False)
    return out


def compile_products(
    wanted: Iterable[tuple[Tensor, PackedMatrix, Tensor, Epilogue, AnyTiling, PieceSums, bool]],
) -> None:
    """Compile for these arguments of multiply_packed, several at a time; computes nothing."""
    if not hasattr(triton, "AsyncCompileMode"):
        return
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        for x, matrix, out, epilogue, tiling, scratch, is_late in wanted:
            if isinstance(tiling, PackedTiling):
                _launch(x, matrix, out, epilogue, tiling, scratch, is_late=is_late, is_warmup=True)
            else:
                multiply_one_row(x, matrix, out, epilogue, tiling, is_late=is_late, is_warmup=True)


def _launch(
    x: Tensor, matrix: PackedMatrix, out: Tensor, epilogue: Epilogue, tiling: PackedTiling, scratch: PieceSums,
    *, is_late: bool, is_warmup: bool,
) -> None:  # fmt: skip
    rows, depth = x.shape
    columns = matrix.shape[0] // 2 if epilogue is Epilogue.SILU_GATED else matrix.shape[0]
    packing, pieces = matrix.packing, triton.cdiv(depth, PIECE)
    run = tiling.run or pieces
    grid = (triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns), triton.cdiv(pieces, run))
    is_split = run < pieces
    if is_split and (grid[0] > NUM_TILES or grid[0] * tiling.rows * tiling.columns * pieces > NUM_SUMS):
        raise ValueError(
            f"{rows} rows of {matrix.shape} need more scratch memory than there is; use {replace(tiling, run=0)}"
        )
    multiply_kernel.run(
        x, matrix.low, matrix.low if matrix.high is None else matrix.high, matrix.scales, out, scratch.sums,
        scratch.finished, rows, columns, matrix.shape[0], matrix.tiles, depth, run, x.stride(0), out.stride(0),
        **_constants(packing), PIECE=PIECE, ROWS=tiling.rows, COLUMNS=tiling.columns,
        STAGES=tiling.stages, IS_EVEN=columns % tiling.columns == 0,
        IS_WHOLE=depth % packing.tile == 0, IS_SPLIT=is_split, EPILOGUE=int(epilogue),
        IS_LATE=is_late, num_warps=tiling.warps, grid=grid, warmup=is_warmup, **LAUNCH,
    )  # fmt: skip


def _constants(packing: Packing) -> dict[str, int]:
    """What the kernels are compiled for."""
    return {
        "BITS": packing.bits, "ZERO": packing.zero, "GROUP": packing.group, "SEGMENT": packing.segment,
        "TILE": packing.tile, "PER_LOW": packing.per_low, "PER_HIGH": packing.per_high,
    }  # fmt: skip


def multiply_values(x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> Tensor:
    """The same product with values that write_values has written; STORE and ADD."""
    rows, depth = x.shape
    tile_rows, tile_columns, step, stages, warps = (128, 128, 64, 4, 8) if rows > 64 else (64, 64, 64, 4, 4)
    columns = len(weight)
    pieces_kernel[(triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns),)](
        x, weight, out, rows, columns, x.stride(0), weight.stride(0), out.stride(0),
        DEPTH=depth, PIECE=PIECE, ROWS=tile_rows, COLUMNS=tile_columns, STEP=step, STAGES=stages, GROUPED=GROUP,
        IS_EVEN=depth % step == 0 and columns % tile_columns == 0, EPILOGUE=int(epilogue), num_warps=warps, **LAUNCH,
    )  # fmt: skip
    return out


def write_values(matrix: PackedMatrix, out: Tensor, first: int = 0, ids: Tensor | None = None) -> Tensor:
    """The values of as many columns as out has rows: those of ids, or those from `first` on."""
    packing, grid = matrix.packing, (triton.cdiv(len(out), VALUE_COLUMNS), matrix.tiles)
    if len(out):
        values_kernel[grid](
            matrix.low if ids is None else ids, matrix.low, matrix.low if matrix.high is None else matrix.high,
            matrix.scales, out, len(out), first, matrix.shape[0], matrix.shape[1], out.stride(0),
            **_constants(packing), COLUMNS=VALUE_COLUMNS, HAS_IDS=ids is not None, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return out


def values(matrix: PackedMatrix, dtype: torch.dtype, first: int = 0, count: int | None = None) -> Tensor:
    """The values of some columns, in new memory."""
    count = matrix.shape[0] - first if count is None else count
    return write_values(matrix, torch.empty(count, matrix.shape[1], dtype=dtype, device=matrix.low.device), first)
