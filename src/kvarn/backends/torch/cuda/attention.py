"""Paged attention on a GPU: one arithmetic for prompts, decoding and denoising.

A query's result depends on its own sequence alone, bit by bit: keys are taken in tiles of KEY_TILE slots counted from
slot 0, each with its own largest score, and the tiles are merged left to right, whoever computes them. Row sums go
through the matrix unit, which adds in the same order for every tile of queries. Tiles that a query does not see add
exactly nothing, so where the loop begins does not matter either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvarn.backends.torch.cuda.attention_kernels import LOG2_E, attend_kernel
from kvarn.backends.torch.cuda.dependent import LAUNCH
from kvarn.backends.torch.step import PagedTiles
from kvarn.models.spec import Attention

try:
    from kvarn.backends.torch.cuda import prompts
except ImportError:  # an older Triton
    prompts = None  # type: ignore[assignment]

KEY_TILE = 64  # slots of one step of the loop
MIN_ROWS = 16  # of a matrix product
FEW_PROGRAMS = 512
MASKS = {"causal": 0, "block_causal": 1, "bidirectional": 2}


@dataclass(frozen=True, slots=True)
class Parts:
    """Scratch memory of a split attention: what every (tile of queries, KV head, tile of keys) gives."""

    sums: Tensor  # (tiles, kv heads, key tiles, rows, head_dim) f32
    stats: Tensor  # (tiles, kv heads, key tiles, rows, 2) f32: largest score, sum of weights
    finished: Tensor  # (tiles x kv heads) int32, zeros before and after: how many of them are there


@dataclass(frozen=True, slots=True)
class Launch:
    """How a program is run; changes no bit."""

    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """The attention kernel for one kind of layer and one size of tiles."""

    attention: Attention
    num_queries: int  # of one tile
    block_size: int

    @property
    def is_large(self) -> bool:
        """Whether tiles are those of the kernel for large prompts."""
        return prompts is not None and prompts.suits(self.attention, self.num_queries, self.block_size)

    @property
    def padded_dim(self) -> int:
        return max(MIN_ROWS, int(triton.next_power_of_2(self.attention.head_dim)))

    @property
    def held(self) -> int:
        """Rows of a program's matrix that are there: queries times query heads of one KV head."""
        return self.num_queries * self.attention.num_heads // self.attention.num_kv_heads

    @property
    def rows(self) -> int:
        return max(MIN_ROWS, int(triton.next_power_of_2(self.held)))

    def constants(self) -> dict[str, object]:
        """What is compiled in."""
        attention = self.attention
        return {
            "HEADS": attention.num_heads,
            "KV_HEADS": attention.num_kv_heads,
            "DIM": attention.head_dim,
            "DIM_PAD": self.padded_dim,
            "ROWS": self.rows,
            "HELD": self.held,
            "MASK": MASKS[attention.mask],
            "MASK_BLOCK": attention.mask_block or 0,
            "WINDOW": attention.window or 0,
            "HAS_CAP": attention.softcap is not None,
            "HAS_SINKS": attention.sinks,
            "BLOCK": self.block_size,
            "TILE": KEY_TILE,
        }

    def launch(self, num_programs: int, element_size: int, *, is_split: bool) -> Launch:
        """Chosen by measurement on an H200."""
        if self.rows >= 64:
            return Launch(warps=4, stages=2)
        if is_split:
            return Launch(warps=4, stages=1)
        if self.padded_dim * element_size > 256:
            return Launch(warps=2, stages=3)
        # Half of the stages read ahead: the blocks' numbers are read one stage before.
        return Launch(warps=4, stages=7 if num_programs <= FEW_PROGRAMS else 5)


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    sinks: Tensor | None,
    tiles: PagedTiles,
    positions: Tensor,
    about: Kernel,
    parts: Parts | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """Attend q (rows, heads, head_dim) to a layer's K and V (blocks, kv_heads, block size, head_dim).

    With parts, a sequence's tiles of keys are computed side by side: for few sequences. The same bits.
    """
    attention, is_split = about.attention, parts is not None
    if prompts is not None and not is_split and about.is_large and not tiles.is_decode:
        return prompts.attend(q, cache, tiles, positions, attention)
    out = torch.empty_like(q)
    num_programs = len(tiles.sequences) * attention.num_kv_heads
    launch = launch or about.launch(num_programs, cache[0].element_size(), is_split=is_split)
    constants = about.constants() | LAUNCH
    constants |= {"IS_DECODE": tiles.is_decode, "STAGES": launch.stages, "num_warps": launch.warps}
    grid = (len(tiles.sequences), attention.num_kv_heads)
    scale = attention.scale * (1.0 if attention.softcap else LOG2_E.value)
    queries = (tiles.sequences, tiles.first_rows, tiles.counts, positions, tiles.contexts, tiles.shifts)
    common = (q, out, *cache, sinks, q.stride(0), *queries, tiles.tables, tiles.tables.stride(0))
    limits = (scale, attention.softcap or 0.0)
    if parts is None:
        attend_kernel[grid](*common, *limits, None, None, None, 0, SPLIT=False, **constants)
        return out
    most = parts.stats.shape[2]
    scratch = (parts.sums, parts.stats, parts.finished, most)
    attend_kernel[(*grid, most)](*common, *limits, *scratch, SPLIT=True, **constants)
    return out


def part_bytes(num_tiles: int, about: Kernel, num_key_tiles: int) -> int:
    """Scratch memory of a split attention."""
    return 4 * num_tiles * about.attention.num_kv_heads * num_key_tiles * about.held * (about.padded_dim + 2)


def new_parts(num_tiles: int, about: Kernel, num_key_tiles: int, finished: Tensor) -> Parts:
    """Scratch for so many tiles of queries and of keys."""
    shape, device = (num_tiles, about.attention.num_kv_heads, num_key_tiles, about.held), finished.device
    sums = torch.empty(*shape, about.padded_dim, device=device)
    return Parts(sums, torch.empty(*shape, 2, device=device), finished)
