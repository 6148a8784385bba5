"""Which keys and values sparse diffusion keeps, on the device; backends/batch.Keep says what is wanted."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.backends.batch import Keep
from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.step import Step
from kvarn.backends.torch.weights import BlockWeights


def pack_kept(q: Tensor, block: BlockWeights, step: Step, cache: DeviceCache) -> None:
    """Pack what each Keep of the batch asks for, from one layer's rotated queries (rows, heads, head_dim)."""
    batch = step.batch
    for keep in batch.keep:
        first, end = (int(row) for row in batch.row_starts[keep.sequence : keep.sequence + 2])
        positions = batch.positions[first:end]
        rows = first + np.flatnonzero((positions >= keep.block_start) & (positions < keep.block_end))
        table = batch.block_tables[keep.sequence].astype(np.int64)
        slots = np.arange(int(batch.context_lens[keep.sequence]))
        found = table[slots // cache.block_size] * cache.block_size + slots % cache.block_size
        keys = cache.layers[block.index][0][torch.from_numpy(found).to(q.device)].float()
        kept = kept_slots(keep, q[torch.from_numpy(rows).to(q.device)], keys, block.spec.attention.scale)
        cache.pack(block.index, table, kept, keep.table.astype(np.int64))


def kept_slots(keep: Keep, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Choose the slots each KV head keeps, (kv_heads, num_kept), ascending."""
    slots = torch.arange(len(k), device=k.device)
    outside = slots[(slots < keep.block_start) | (slots >= keep.block_end)]
    mean = q.mean(dim=0).view(k.shape[1], -1, k.shape[2])
    scores = (torch.einsum("hgd,khd->hgk", mean, k[outside]) * scale).amax(dim=1)
    if not keep.per_head:
        scores = scores.sum(dim=0, keepdim=True).expand_as(scores)
    reach = keep.pool_kernel // 2
    pooled = F.max_pool1d(F.pad(scores, (reach, reach), value=-math.inf), keep.pool_kernel, stride=1)
    best = torch.argsort(pooled, dim=1, descending=True, stable=True)[:, : keep.num_kept]
    return torch.sort(outside[best], dim=1).values
