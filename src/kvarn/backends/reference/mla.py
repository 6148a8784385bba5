"""Multi-head latent attention in NumPy: the definition of LatentAttention's fields.

One form for prompts and for single tokens: queries are brought to the latent space, where the cached rows are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvarn.backends.batch import Batch
from kvarn.backends.reference.attention import PagedCache, rotate, sequences_of
from kvarn.backends.reference.layers import Float32, Weights, linear, normalise, softmax
from kvarn.models.spec import LatentAttention


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """One block's latent attention and where its rows are kept."""

    index: int
    attention: LatentAttention
    cache: PagedCache | None


def attend_latent(x: Float32, weights: Weights, layer: LatentLayer, batch: Batch) -> Float32:
    """Apply the latent attention of one block to all rows of a batch."""
    stem, attention = f"blk.{layer.index}", layer.attention
    q = _queries(x, weights, stem, attention, batch)
    rows = _rows(x, weights, stem, attention, batch)
    mixed = np.empty((len(x), attention.num_heads, attention.rank), np.float32)
    for sequence in sequences_of(batch):
        keys = rows[sequence.rows]
        if sequence.table is not None:
            assert layer.cache is not None, "reserve_kv comes before forward"
            slots = sequence.positions - sequence.shift
            layer.cache.store(layer.index, sequence.table, slots, keys[:, None], keys[:, None, :0])
            keys = layer.cache.read(layer.index, sequence.table, sequence.length)[0][:, 0]
        seen = np.arange(len(keys)) + sequence.shift <= sequence.positions[:, None]
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        for head in range(attention.num_heads):
            scores = q[sequence.rows, head] @ keys.T * np.float32(attention.scale) + mask
            mixed[sequence.rows, head] = softmax(scores) @ keys[:, : attention.rank]
    values = np.einsum("nhr,hvr->nhv", mixed, weights[f"{stem}.attn_v_b.weight"])
    return linear(values.reshape(len(x), -1), weights, f"{stem}.attn_output")


def _queries(x: Float32, weights: Weights, stem: str, attention: LatentAttention, batch: Batch) -> Float32:
    """Queries of cached rows, (rows, heads, rank + rope_dim)."""
    if attention.query_rank is None:
        q = linear(x, weights, f"{stem}.attn_q")
    else:
        low = normalise(linear(x, weights, f"{stem}.attn_q_a"), weights, f"{stem}.attn_q_a_norm", attention.norm)
        q = linear(low, weights, f"{stem}.attn_q_b")
    q = q.reshape(len(x), attention.num_heads, -1)
    absorbed = np.einsum("nhd,hrd->nhr", q[..., : attention.nope_dim], weights[f"{stem}.attn_k_b.weight"])
    return np.concatenate([absorbed, rotate(q[..., attention.nope_dim :], batch.positions, attention.rope)], axis=-1)


def _rows(x: Float32, weights: Weights, stem: str, attention: LatentAttention, batch: Batch) -> Float32:
    """What is cached, (rows, rank + rope_dim)."""
    row = linear(x, weights, f"{stem}.attn_kv_a_mqa")
    latent = normalise(row[:, : attention.rank], weights, f"{stem}.attn_kv_a_norm", attention.norm)
    key = rotate(row[:, None, attention.rank :], batch.positions, attention.rope)[:, 0]
    return np.concatenate([latent, key], axis=-1)
