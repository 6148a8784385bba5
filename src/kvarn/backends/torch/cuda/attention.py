"""Paged attention on a GPU: one arithmetic for prompts, decoding and denoising.

A query's result depends on its own sequence alone, bit by bit: keys are taken in tiles of KEY_TILE slots counted from
slot 0, summed in pieces of PIECE slots, and the pieces are merged left to right, whoever computes them. Row sums go
through the matrix unit, which adds in the same order for every tile of queries. Tiles that a query does not see add
exactly nothing, so where the loop begins does not matter either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvarn.backends.torch.cuda.attention_kernels import LOG2_E, attend_kernel, merge_kernel
from kvarn.backends.torch.step import PIECE, PagedTiles
from kvarn.models.spec import Attention

KEY_TILE = 64  # slots of one step of the loop
MIN_ROWS = 16  # of a matrix product
MERGE_CONSTANTS = (
    "HEADS",
    "KV_HEADS",
    "DIM",
    "DIM_PAD",
    "ROWS",
    "MASK",
    "MASK_BLOCK",
    "WINDOW",
    "TILE",
    "PIECE_SLOTS",
    "IS_DECODE",
)
MASKS = {"causal": 0, "block_causal": 1, "bidirectional": 2}


@dataclass(frozen=True, slots=True)
class Pieces:
    """Scratch memory of a split attention: partial results of every (tile, KV head, piece)."""

    sums: Tensor  # (tiles, kv heads, pieces, rows, head_dim) f32
    stats: Tensor  # (tiles, kv heads, pieces, rows, 2) f32: largest score, sum of weights


@dataclass(frozen=True, slots=True)
class Kernel:
    """The attention kernel for one kind of layer and one size of tiles."""

    attention: Attention
    rows: int  # of a program's matrix: queries times query heads of one KV head
    block_size: int

    @property
    def padded_dim(self) -> int:
        return max(MIN_ROWS, int(triton.next_power_of_2(self.attention.head_dim)))

    def constants(self) -> dict[str, object]:
        """What is compiled in."""
        attention = self.attention
        return {
            "HEADS": attention.num_heads,
            "KV_HEADS": attention.num_kv_heads,
            "DIM": attention.head_dim,
            "DIM_PAD": self.padded_dim,
            "ROWS": self.rows,
            "MASK": MASKS[attention.mask],
            "MASK_BLOCK": attention.mask_block or 0,
            "WINDOW": attention.window or 0,
            "HAS_CAP": attention.softcap is not None,
            "BLOCK": self.block_size,
            "TILE": KEY_TILE,
            "PIECE_SLOTS": PIECE,
            "STAGES": 3 if self.padded_dim <= 128 and self.rows < 64 else 2,
        }


def rows_for(attention: Attention, num_queries: int) -> int:
    """Rows of a program for so many queries of one sequence."""
    return max(MIN_ROWS, int(triton.next_power_of_2(num_queries * attention.num_heads // attention.num_kv_heads)))


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    tiles: PagedTiles,
    positions: Tensor,
    about: Kernel,
    pieces: Pieces | None = None,
) -> Tensor:
    """Attend q (rows, heads, head_dim) to a layer's K and V (slots, kv_heads, head_dim).

    With pieces, the pieces of a sequence are computed side by side: for few sequences. The same bits.
    """
    out = torch.empty_like(q)
    k, v = cache
    attention, constants = about.attention, about.constants()
    grid = (len(tiles.sequences), attention.num_kv_heads)
    scale = attention.scale * (1.0 if attention.softcap else LOG2_E.value)
    queries = (tiles.sequences, tiles.first_rows, tiles.counts, positions, tiles.contexts, tiles.shifts)
    memory = (q, out, k, v, k.stride(0), k.stride(1), q.stride(0))
    common = (*memory, *queries, tiles.tables, tiles.tables.stride(0), scale, attention.softcap or 0.0)
    constants["IS_DECODE"] = tiles.is_decode
    if pieces is None:
        warps = 4 if about.rows >= 64 else 2
        attend_kernel[grid](*common, None, None, 0, SPLIT=False, **constants, num_warps=warps)
        return out
    scratch = (pieces.sums, pieces.stats, pieces.stats.shape[2])
    attend_kernel[(*grid, pieces.stats.shape[2])](*common, *scratch, SPLIT=True, **constants, num_warps=4)
    merged = {name: constants[name] for name in MERGE_CONSTANTS}
    merge_kernel[grid](out, q.stride(0), *queries, *scratch, **merged, num_warps=2)
    return out


def new_pieces(num_tiles: int, about: Kernel, max_context: int, device: torch.device) -> Pieces:
    """Scratch for so many tiles and contexts up to so many slots."""
    shape = (num_tiles, about.attention.num_kv_heads, -(-max_context // PIECE), about.rows)
    return Pieces(torch.empty(*shape, about.padded_dim, device=device), torch.empty(*shape, 2, device=device))
