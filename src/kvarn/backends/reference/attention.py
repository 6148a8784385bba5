"""Attention over a paged cache in NumPy: rope, cache, scores, mask, softmax.

The cache of a layer is two arrays (blocks, block_size, kv_heads, head_dim) in the layout's type (q8_0: floats rounded
to what it can hold); slot s of a sequence lies in block table[s // block_size] at s % block_size. A token's slot is its
position, less the sequence's shift. Layers of the window group have tables of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch, BlockCopy, Keep, KVLayout
from kvarn.backends.reference.keep import Slots, kept_slots
from kvarn.backends.reference.layers import (
    Float32,
    Int32,
    Weights,
    linear,
    normalise,
    sigmoid,
    softcap,
    softmax,
    unit_rms,
)
from kvarn.models.memory_plan import Q8_GROUP
from kvarn.models.spec import Attention, Rope, Temperature

Array = npt.NDArray[np.floating]


class PagedCache:
    """K and V of every layer, by block and slot."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.block_size = layout.block_size
        self._dtype = layout.dtype
        dtype = np.float16 if layout.dtype == "f16" else np.float32
        self.windowed = layout.windowed or (False,) * len(layout.layers)
        stems = [(layout.num_window_blocks if one else num_blocks, layout.block_size) for one in self.windowed]
        self.layers: list[tuple[Array, Array]] = [
            (np.zeros((*stem, heads, dim), dtype), np.zeros((*stem, heads, value_dim), dtype))
            for stem, (heads, dim), value_dim in zip(stems, layout.layers, layout.value_dims, strict=True)
        ]

    def store(self, layer: int, table: Int32, slots: Int32, k: Float32, v: Float32) -> None:
        blocks, offsets = table[slots // self.block_size], slots % self.block_size
        for cache, values in zip(self.layers[layer], (k, v), strict=True):
            cache[blocks, offsets] = round_q8_0(values) if self._dtype == "q8_0" else values

    def read(self, layer: int, table: Int32, length: int) -> tuple[Float32, Float32]:
        """Return K and V of the first `length` tokens, (length, kv_heads, head_dim) each; zeros where none is kept."""
        blocks = table[: -(-length // self.block_size)]
        slots = len(blocks) * self.block_size
        is_kept = (blocks >= 0)[:, None, None, None]
        found = (np.where(is_kept, cache[blocks], cache.dtype.type(0)) for cache in self.layers[layer])
        k, v = (values.reshape(slots, *values.shape[2:])[:length].astype(np.float32) for values in found)
        return k, v

    def pack(self, layer: int, table: Int32, kept: Slots, target: Int32) -> None:
        """Copy the kept slots of every KV head (kv_heads, kept) of one table to the first slots of another."""
        heads, slots = np.arange(len(kept))[:, None], np.arange(kept.shape[1])
        for cache in self.layers[layer]:
            values = cache[table[kept // self.block_size], kept % self.block_size, heads]
            cache[target[slots // self.block_size], slots % self.block_size, heads] = values

    def block(self, block_id: int) -> list[Array]:
        """The parts of a block of the layers that keep all."""
        pairs = (pair for pair, windowed in zip(self.layers, self.windowed, strict=True) if not windowed)
        return [cache[block_id] for pair in pairs for cache in pair]

    def copy(self, copy: BlockCopy) -> None:
        for pair, windowed in zip(self.layers, self.windowed, strict=True):
            for cache in pair if windowed == bool(copy.group) else ():
                cache[copy.target, : copy.num_tokens] = cache[copy.source, : copy.num_tokens]


def round_q8_0(x: Float32) -> Float32:
    """What a q8_0 cache gives back of x (..., head_dim): int8 times an f16 scale per token, head and 32 dimensions.

    scale = f16(absmax / 127), q = x * (1 / scale) to the nearest even whole number, held to -127 .. 127. A group with
    NaN, infinity or a scale beyond f16 becomes NaN.
    """
    width = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -width % Q8_GROUP)]
    groups = np.pad(x, padding).reshape(*x.shape[:-1], -1, Q8_GROUP)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        absmax = np.abs(groups).max(axis=-1, keepdims=True)
        scale = (absmax / np.float32(127)).astype(np.float16).astype(np.float32)
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
        rounded = np.clip(np.rint(groups * inverse), -127, 127) * np.where(np.isfinite(scale), scale, np.float32("nan"))
    return rounded.reshape(*x.shape[:-1], -1)[..., :width].astype(np.float32)


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's attention and where its keys and values are kept."""

    index: int
    attention: Attention
    cache: PagedCache | None


@dataclass(frozen=True, slots=True)
class Sequence:
    """The rows of one sequence in a batch. table is None where nothing is cached: the batch holds all of it."""

    rows: slice
    positions: Int32
    length: int
    table: Int32 | None
    shift: int = 0
    keep: tuple[Keep, ...] = ()
    window_table: Int32 | None = None  # of the layers that keep a window
    canvas_start: int | None = None  # None: no row of it is one of a canvas


def sequences_of(batch: Batch) -> list[Sequence]:
    """Split a batch into its sequences."""
    found = []
    for i, length in enumerate(batch.context_lens):
        rows = slice(int(batch.row_starts[i]), int(batch.row_starts[i + 1]))
        table = batch.block_tables[i] if batch.block_tables.shape[1] > 0 else None
        shift = 0 if batch.slot_shifts is None else int(batch.slot_shifts[i])
        keep = tuple(keep for keep in batch.keep if keep.sequence == i)
        window_table = None if batch.window_tables is None else batch.window_tables[i]
        start = None if batch.canvases is None else int(batch.canvases.starts[i])
        found.append(Sequence(rows, batch.positions[rows], int(length), table, shift, keep, window_table, start))
    return found


def attend(x: Float32, weights: Weights, layer: Layer, batch: Batch) -> Float32:
    """Apply the attention sublayer of one block to all rows of a batch."""
    stem, attention = f"blk.{layer.index}", layer.attention
    q = _positioned(x, weights, f"{stem}.attn_q", attention, batch.positions)
    q = q * query_factors(batch.positions, attention.temperature)
    own = _keys_and_values(x, weights, stem, attention, batch.positions) if attention.kv_source is None else None
    out = np.empty_like(q)
    for sequence in sequences_of(batch):
        rows = sequence.rows
        if sequence.table is not None:
            keys, values = _cached(layer, sequence, q[rows], own)
        else:
            assert own is not None, "only what is cached can be shared"
            keys, values = own[0][rows], own[1][rows]
        seen = visible(sequence.positions, sequence.length, attention, sequence.shift, sequence.canvas_start)
        scores = _scores(q[rows], keys, seen, attention)
        if attention.alibi is not None:
            scores = scores - _distances(sequence, attention.alibi)
        if attention.sinks:
            scores = _with_sinks(scores, weights[f"{stem}.attn_sinks.weight"])
        out[rows] = _mix(scores, values)
    mixed = out.reshape(len(x), -1)
    if attention.output_gate:
        mixed = mixed * sigmoid(linear(x, weights, f"{stem}.attn_gate", attention.qkv_bias))
    return linear(mixed, weights, f"{stem}.attn_output", attention.output_bias)


def _positioned(x: Float32, weights: Weights, name: str, attention: Attention, positions: Int32) -> Float32:
    """Q or K of all rows, (rows, heads, head_dim), normalised and rotated."""
    y = linear(x, weights, name, attention.qkv_bias).reshape(len(x), -1, attention.head_dim)
    if not attention.qk_norm_after_rope:
        y = _normalised(y, weights, f"{name}_norm", attention)
    if attention.rope is not None:
        y = rotate(y, positions, attention.rope)
    return _normalised(y, weights, f"{name}_norm", attention) if attention.qk_norm_after_rope else y


def _keys_and_values(
    x: Float32, weights: Weights, stem: str, attention: Attention, positions: Int32
) -> tuple[Float32, Float32]:
    k = _positioned(x, weights, f"{stem}.attn_k", attention, positions)
    v = linear(x, weights, f"{stem}.attn_v", attention.qkv_bias).reshape(k.shape)
    return k, v if attention.value_norm_eps is None else unit_rms(v, np.float32(attention.value_norm_eps))


def _cached(
    layer: Layer, sequence: Sequence, q: Float32, own: tuple[Float32, Float32] | None
) -> tuple[Float32, Float32]:
    """Store K and V of the new tokens, unless an earlier layer did, and return those of all of the sequence's."""
    assert layer.cache is not None, "reserve_kv comes before forward"
    source = layer.index if layer.attention.kv_source is None else layer.attention.kv_source
    table = sequence.window_table if layer.cache.windowed[source] else sequence.table
    assert table is not None, "the cache has windows, the batch has no window_tables"
    if own is None:
        return layer.cache.read(source, table, sequence.length)
    k, v = (values[sequence.rows] for values in own)
    layer.cache.store(source, table, sequence.positions - sequence.shift, k, v)
    keys, values = layer.cache.read(source, table, sequence.length)
    for keep in sequence.keep:
        _pack(keep, layer, sequence, q, keys)
    return keys, values


def rotate(x: Float32, positions: Int32, rope: Rope) -> Float32:
    """Rotate pairs of dimensions by angles that grow with the position. x is (rows, heads, head_dim)."""
    inverse = np.asarray(rope.inverse_frequencies, np.float64)
    angles = positions[:, None, None] * inverse
    cos, sin = ((f(angles) * rope.magnitude).astype(np.float32) for f in (np.cos, np.sin))
    n = len(inverse)
    first, second = (
        (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if rope.style == "interleaved" else (slice(0, n), slice(n, 2 * n))
    )
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def visible(
    positions: Int32, length: int, attention: Attention, shift: int = 0, canvas_start: int | None = None
) -> npt.NDArray[np.bool_]:
    """Return which of the keys in slots 0 .. length - 1 each query sees, (queries, keys)."""
    keys, queries = np.arange(length) + shift, positions[:, None]
    if attention.mask == "canvas" and canvas_start is not None:
        seen = keys <= np.where(queries < canvas_start, queries, length)
        first = np.minimum(queries, canvas_start) - (attention.window or length + 1) + 1
        return seen & (keys >= first)
    if attention.mask == "bidirectional":
        seen = np.ones((len(positions), length), bool)
    elif attention.mask == "block_causal":
        assert attention.mask_block is not None, "a block_causal mask has blocks"
        seen = keys < (queries // attention.mask_block + 1) * attention.mask_block
    else:
        seen = keys <= queries
    if attention.window is None:
        return seen
    first = queries - queries % attention.window if attention.is_chunked else queries - attention.window + 1
    return seen & (keys >= first) & (keys < queries + attention.window)


def _pack(keep: Keep, layer: Layer, sequence: Sequence, q: Float32, keys: Float32) -> None:
    assert layer.cache is not None, "reserve_kv comes before forward"
    assert sequence.table is not None, "only what is cached can be kept"
    is_block = (sequence.positions >= keep.block_start) & (sequence.positions < keep.block_end)
    kept = kept_slots(keep, q[is_block], keys, layer.attention.scale)
    layer.cache.pack(layer.index, sequence.table, kept, keep.table)


def _normalised(x: Float32, weights: Weights, name: str, attention: Attention) -> Float32:
    """Normalise Q or K, (rows, heads, head_dim), as qk_norm says."""
    if attention.qk_norm is None:
        return x
    shaped = x.reshape(len(x), -1) if attention.qk_norm_span == "row" else x
    return normalise(shaped, weights, name, attention.qk_norm).reshape(x.shape)


def query_factors(positions: Int32, temperature: Temperature | None) -> Float32:
    """What the queries of each row are multiplied by, (rows, 1, 1)."""
    if temperature is None:
        return np.ones((len(positions), 1, 1), np.float32)
    factors = 1 + temperature.beta * np.log1p((positions + temperature.offset) // temperature.length)
    return factors.astype(np.float32)[:, None, None]


def _scores(q: Float32, k: Float32, seen: npt.NDArray[np.bool_], attention: Attention) -> Float32:
    """Score the keys of one sequence for every query head, (heads, queries, keys); q is (queries, heads, head_dim)."""
    mask = np.where(seen, np.float32(0), np.float32(-np.inf))
    group = attention.num_heads // attention.num_kv_heads
    products = [q[:, head] @ k[:, head // group].T for head in range(attention.num_heads)]
    return softcap(np.stack(products) * np.float32(attention.scale), attention.softcap) + mask


def _distances(sequence: Sequence, slopes: tuple[float, ...]) -> Float32:
    """How far each query is from each key, times each head's slope: (heads, queries, keys)."""
    keys = np.arange(sequence.length) + sequence.shift
    far = np.abs(sequence.positions[:, None] - keys).astype(np.float32)
    taken: Float32 = np.asarray(slopes, np.float32)[:, None, None] * far
    return taken


def _with_sinks(scores: Float32, sinks: Float32) -> Float32:
    """Add a last key to every head, which has a score and no value."""
    return np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)


def _mix(scores: Float32, v: Float32) -> Float32:
    """Mix the values (keys, kv_heads, head_dim) by the softmax of the scores."""
    group = len(scores) // v.shape[1]
    mixed = [softmax(one)[:, : len(v)] @ v[:, head // group] for head, one in enumerate(scores)]
    return np.stack(mixed, axis=1)
