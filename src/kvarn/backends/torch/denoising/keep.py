"""Which keys and values sparse diffusion keeps, on the device; backends/batch.Keep says what is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.backends.batch import Keep
from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.device import on_device
from kvarn.backends.torch.step import Step
from kvarn.backends.torch.weights import BlockWeights

# Scores of the KV heads that are here -> those of all the model's KV heads, and where the first are among them.
AllHeads = Callable[[Tensor, BlockWeights], tuple[Tensor, slice]]


def heads_here(scores: Tensor, block: BlockWeights) -> tuple[Tensor, slice]:  # noqa: ARG001
    """For a device that has all of them."""
    return scores, slice(None)


def pack_kept(q: Tensor, block: BlockWeights, step: Step, cache: DeviceCache, all_heads: AllHeads) -> None:
    """Pack what each Keep of the batch asks for, from one layer's rotated queries (rows, heads, head_dim)."""
    batch = step.batch
    for keep in batch.keep:
        first, end = (int(row) for row in batch.row_starts[keep.sequence : keep.sequence + 2])
        positions = batch.positions[first:end]
        rows = first + np.flatnonzero((positions >= keep.block_start) & (positions < keep.block_end))
        table = batch.block_tables[keep.sequence].astype(np.int64)
        slots = np.arange(int(batch.context_lens[keep.sequence]))
        outside = slots[(slots < keep.block_start) | (slots >= keep.block_end)]
        found = table[outside // cache.block_size] * cache.block_size + outside % cache.block_size
        keys = cache.rows(block.index)[0][on_device(found, q.device)].float()
        scores = _scores(q[on_device(rows, q.device)], keys, block.attention.scale)
        scores, own = all_heads(scores, block)
        kept = _kept_slots(keep, scores, on_device(outside, q.device))[own]
        cache.pack(block.index, table, kept, keep.table.astype(np.int64))


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """How much each key matters to a block's queries, (kv_heads, keys)."""
    mean = q.mean(dim=0).view(k.shape[1], -1, k.shape[2])
    return (torch.einsum("hgd,khd->hgk", mean, k) * scale).amax(dim=1)


def _kept_slots(keep: Keep, scores: Tensor, slots: Tensor) -> Tensor:
    """Choose among the keys at these slots those that each KV head keeps, (kv_heads, num_kept), ascending."""
    if not keep.per_head:
        scores = scores.sum(dim=0, keepdim=True).expand_as(scores)
    reach = keep.pool_kernel // 2
    pooled = F.max_pool1d(F.pad(scores, (reach, reach), value=-math.inf), keep.pool_kernel, stride=1)
    best = torch.argsort(pooled, dim=1, descending=True, stable=True)[:, : keep.num_kept]
    return torch.sort(slots[best], dim=1).values
