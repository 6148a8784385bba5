"""Which keys and values sparse diffusion keeps, in NumPy: the definition of backends/batch.Keep."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Keep
from kvarn.backends.reference.layers import Float32

Slots = npt.NDArray[np.intp]


def kept_slots(keep: Keep, q: Float32, k: Float32, scale: float) -> Slots:
    """Choose the slots each KV head keeps, (kv_heads, num_kept), ascending.

    q is (the block's queries, heads, head_dim), k (context, kv_heads, head_dim).
    """
    outside = np.delete(np.arange(len(k)), slice(keep.block_start, keep.block_end))
    scores = block_scores(q, k[outside], scale)
    if not keep.per_head:
        scores = np.broadcast_to(scores.sum(axis=0), scores.shape)
    best = np.argsort(-max_pool(scores, keep.pool_kernel), axis=1, kind="stable")[:, : keep.num_kept]
    return np.sort(outside[best], axis=1)


def block_scores(q: Float32, k: Float32, scale: float) -> Float32:
    """Score every key by the block's mean query, (kv_heads, keys): the mean of products is the product of the mean."""
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    mean = q.mean(axis=0, dtype=np.float32).reshape(num_kv_heads, num_heads // num_kv_heads, -1)
    products: Float32 = np.einsum("hgd,khd->hgk", mean, k) * np.float32(scale)
    best: Float32 = products.max(axis=1)
    return best


def max_pool(scores: Float32, kernel: int) -> Float32:
    """Give every key the largest score within kernel // 2 keys of it."""
    reach = kernel // 2
    padded = np.pad(scores, ((0, 0), (reach, reach)), constant_values=-np.inf)
    pooled: Float32 = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=1).max(axis=2)
    return pooled
