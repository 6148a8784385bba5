"""Latent attention on a GPU: products of each head with its own matrix, rope with the write to the cache, launches.

The arithmetic of attention.py: keys in tiles by absolute slot, merged left to right, and one ascending chain of sums in
every product; a row has the same bits alone, in company and in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvarn.backends.torch.cuda.attention import KEY_TILE, MIN_ROWS, Parts
from kvarn.backends.torch.cuda.attention_kernels import LOG2_E
from kvarn.backends.torch.cuda.dependent import LAUNCH
from kvarn.backends.torch.cuda.latents.kernels import attend_kernel, heads_kernel, rope_kernel
from kvarn.backends.torch.mixers.recurrent import RowOps
from kvarn.backends.torch.rope import RopeTable
from kvarn.backends.torch.step import PagedTiles, Step
from kvarn.backends.torch.weights import BlockWeights
from kvarn.models.spec import LatentAttention

MAX_HEADS = 16  # of a program
MAX_ROWS = 32  # queries times heads of a program
FEW_ROWS, MANY_ROWS = 16, 64  # of a product's tile


@dataclass(frozen=True, slots=True)
class LatentKernel:
    """The attention kernel for one kind of layer and one size of tiles."""

    mixer: LatentAttention
    num_queries: int  # of one tile
    block_size: int

    @property
    def heads(self) -> int:
        return program_heads(self.mixer)

    @property
    def groups(self) -> int:
        """Programs for all heads of a tile of queries."""
        return self.mixer.num_heads // self.heads

    @property
    def held(self) -> int:
        return self.num_queries * self.heads

    @property
    def padded_rank(self) -> int:
        return _padded(self.mixer.rank)

    def part_bytes(self, num_tiles: int, num_key_tiles: int) -> int:
        """Scratch memory of an attention whose tiles of keys are computed side by side."""
        return 4 * num_tiles * self.groups * num_key_tiles * self.held * (self.padded_rank + 2)

    def new_parts(self, num_tiles: int, num_key_tiles: int, finished: Tensor) -> Parts:
        shape, device = (num_tiles, self.groups, num_key_tiles, self.held), finished.device
        sums = torch.empty(*shape, self.padded_rank, device=device)
        return Parts(sums, torch.empty(*shape, 2, device=device), finished)


def program_heads(mixer: LatentAttention) -> int:
    """Heads that one program takes: a power of two that divides them."""
    return min(MAX_HEADS, mixer.num_heads & -mixer.num_heads)


def prompt_tile(mixer: LatentAttention) -> int:
    """Queries of one tile of prompts."""
    return max(1, MAX_ROWS // program_heads(mixer))


def attend_latent(
    x: Tensor, block: BlockWeights, ops: RowOps, rope: RopeTable, step: Step, rows: Tensor, about: LatentKernel,
    parts: Parts | None,
) -> Tensor:  # fmt: skip
    """As mixers.mla.attend_latent, over rows (blocks, 1, block size, rank + rope_dim) of a layer's cache."""
    mixer, weights, tiles = about.mixer, block.latent, step.tiles
    assert weights is not None, "latent attention has its own weights"
    assert isinstance(tiles, PagedTiles), "kernels read block tables"
    first = ops.linear(x, block.qkv)
    q = first[:, : -mixer.row_dim]
    if weights.q_b is not None:
        assert weights.q_norm is not None, "a query of a low rank is normed"
        q = ops.linear(ops.normalise(q.contiguous(), weights.q_norm), weights.q_b)
    latent = ops.normalise(first[:, -mixer.row_dim : -mixer.rope_dim].contiguous(), weights.kv_norm)
    q_rope = _rotate_and_store(q, latent, first[:, -mixer.rope_dim :], mixer, rope, step, rows)
    absorbed = by_head(q, mixer.nope_dim + mixer.rope_dim, weights.k_b)
    found = _attend(absorbed, q_rope, rows, tiles, step.positions, about, parts)
    return by_head(found, mixer.rank, weights.v_b).view(len(x), -1)


def by_head(x: Tensor, head_width: int, matrices: Tensor) -> Tensor:
    """Every head of x (rows, heads x head_width) through its own matrix (heads, out, in) of its first values."""
    heads, width, depth = matrices.shape
    out = torch.empty(len(x), heads, width, dtype=x.dtype, device=x.device)
    tile = FEW_ROWS if len(x) <= FEW_ROWS else MANY_ROWS
    heads_kernel[triton.cdiv(len(x), tile), triton.cdiv(width, 64), heads](
        x, matrices, out, len(x), x.stride(0), head_width, DEPTH=depth, WIDTH=width, HEADS=heads, ROWS=tile,
        num_warps=4, num_stages=3, **LAUNCH,
    )  # fmt: skip
    return out


def _rotate_and_store(
    q: Tensor, latent: Tensor, key: Tensor, mixer: LatentAttention, rope: RopeTable, step: Step, rows: Tensor
) -> Tensor:
    """The rotated part of every head's query, (rows, heads, rope_dim); latents and rotated keys go to the cache."""
    assert step.slots is not None, "kernels read a cache"
    out = torch.empty(len(q), mixer.num_heads, mixer.rope_dim, dtype=q.dtype, device=q.device)
    rope_kernel[(len(q),)](
        q, latent, key, out, rows, rope.cos, rope.sin, step.positions, step.slots, q.stride(0), key.stride(0),
        HEADS=mixer.num_heads, HEADS_PAD=triton.next_power_of_2(mixer.num_heads), NOPE=mixer.nope_dim,
        ROPE=mixer.rope_dim, ROPE_PAD=triton.next_power_of_2(mixer.rope_dim), PAIRS=rope.cos.shape[1],
        RANK=mixer.rank, RANK_PAD=triton.next_power_of_2(mixer.rank), IS_INTERLEAVED=mixer.rope.style == "interleaved",
        **LAUNCH,
    )  # fmt: skip
    return out


def _attend(
    q: Tensor, q_rope: Tensor, rows: Tensor, tiles: PagedTiles, positions: Tensor, about: LatentKernel,
    parts: Parts | None,
) -> Tensor:  # fmt: skip
    mixer, out = about.mixer, torch.empty_like(q)
    grid = (len(tiles.sequences), about.groups, *(() if parts is None else (parts.stats.shape[2],)))
    scratch = (None, None, None, 0) if parts is None else (parts.sums, parts.stats, parts.finished, grid[2])
    attend_kernel[grid](
        q, q_rope, out, rows, tiles.sequences, tiles.first_rows, tiles.counts, positions, tiles.contexts, tiles.shifts,
        tiles.tables, tiles.tables.stride(0), mixer.scale * LOG2_E.value, *scratch,
        HEADS=mixer.num_heads, PER_PROGRAM=about.heads, RANK=mixer.rank, RANK_PAD=about.padded_rank,
        ROPE=mixer.rope_dim, ROPE_PAD=_padded(mixer.rope_dim), ROWS=max(MIN_ROWS, triton.next_power_of_2(about.held)),
        HELD=about.held, BLOCK=about.block_size, TILE=KEY_TILE, STAGES=1 if parts is not None else 2,
        SPLIT=parts is not None, IS_DECODE=tiles.is_decode, num_warps=4 if about.held <= MIN_ROWS else 8, **LAUNCH,
    )  # fmt: skip
    return out


def _padded(dim: int) -> int:
    return max(MIN_ROWS, int(triton.next_power_of_2(dim)))
