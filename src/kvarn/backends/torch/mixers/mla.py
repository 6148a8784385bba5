"""Multi-head latent attention in torch: queries are brought to the latent space, where one row per token is cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvarn.backends.torch.cache import CachedRows, DeviceCache
from kvarn.backends.torch.mixers.recurrent import RowOps
from kvarn.backends.torch.plain import attend_tiles
from kvarn.backends.torch.rope import RopeTable
from kvarn.backends.torch.step import Step, Tiles
from kvarn.backends.torch.weights import BlockWeights, LatentWeights, Linear
from kvarn.models.spec import Attention, LatentAttention

Rotate = Callable[[Tensor], Tensor]


def attend_latent(
    x: Tensor, block: BlockWeights, ops: RowOps, step: Step, cache: DeviceCache, *, rope: RopeTable | None
) -> Tensor:
    """What the layer's output projection reads, of x (rows, width); the rows of the batch are cached first."""
    mixer, weights = block.spec.mixer, block.latent
    assert isinstance(mixer, LatentAttention), "only latent attention comes here"
    assert weights is not None, "latent attention has its own weights"
    assert rope is not None, "latent attention has a rope"
    assert isinstance(step.tiles, Tiles), "plain attention has plain tiles"
    positions = step.positions

    def rotate(part: Tensor) -> Tensor:
        return rope.rotate(part, positions)

    first = ops.linear(x, block.qkv)
    rows = _rows(first[:, -mixer.row_dim :], mixer, weights, ops, rotate)
    q = _queries(first[:, : -mixer.row_dim], mixer, weights, ops, rotate)
    keys: Tensor | CachedRows = rows[: step.num_rows]
    if step.slots is not None:
        cache.store(block.index, step.slots[: step.num_rows], rows[: step.num_rows], rows[: step.num_rows, :, :0])
        keys, _ = cache.rows(block.index)
    found = attend_tiles(q, keys, keys, _as_one_head(block, mixer), step.tiles)[..., : mixer.rank]
    mixed = torch.zeros(len(x), mixer.num_heads, mixer.rank, dtype=x.dtype, device=x.device)
    mixed[: step.num_rows] = found.to(x.dtype)
    return torch.cat(_by_head(mixed, weights.v_b, ops), dim=-1)


def _rows(projected: Tensor, mixer: LatentAttention, weights: LatentWeights, ops: RowOps, rotate: Rotate) -> Tensor:
    """What is cached, (rows, 1, rank + rope_dim) in float32."""
    latent = ops.normalise(projected[:, : mixer.rank].contiguous(), weights.kv_norm).float()
    return torch.cat([latent[:, None], rotate(projected[:, None, mixer.rank :].float())], dim=-1)


def _queries(projected: Tensor, mixer: LatentAttention, weights: LatentWeights, ops: RowOps, rotate: Rotate) -> Tensor:
    """Queries of cached rows, (rows, heads, rank + rope_dim) in float32."""
    q = projected.contiguous()
    if weights.q_b is not None:
        assert weights.q_norm is not None, "a query of a low rank is normed"
        q = ops.linear(ops.normalise(q, weights.q_norm), weights.q_b)
    q = q.view(len(q), mixer.num_heads, -1)
    absorbed = torch.stack(_by_head(q[..., : mixer.nope_dim], weights.k_b, ops), dim=1)
    return torch.cat([absorbed.float(), rotate(q[..., mixer.nope_dim :].float())], dim=-1)


def _by_head(x: Tensor, matrices: Tensor, ops: RowOps) -> list[Tensor]:
    """Every head of x (rows, heads, in) through its own matrix (heads, out, in)."""
    return [ops.linear(x[:, head].contiguous(), Linear(matrix)) for head, matrix in enumerate(matrices)]


def _as_one_head(block: BlockWeights, mixer: LatentAttention) -> BlockWeights:
    """To queries of cached rows it is attention with one KV head, whose values are a part of its keys."""
    attention = Attention(mixer.num_heads, num_kv_heads=1, head_dim=mixer.row_dim, scale=mixer.scale, rope=None)
    return replace(block, spec=replace(block.spec, mixer=attention))
