"""Phi-3: a Llama whose Q, K, V and whose gate and up matrices are stored as one; some with LongRoPE."""

from __future__ import annotations

from kvarn.errors import FormatError
from kvarn.formats.tensor_view import ViewEntry, WeightView, row_slice
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, ModelSpec
from kvarn.models.spec_builder import decoder, one_window, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Phi-3."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    window, activation = one_window(hparams, dims), hparams.activation("silu")
    blocks = tuple(
        Block(
            attention=dims.attention(layer, rope, window=window),
            feed_forward=FeedForward(dims.hidden[layer], activation),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def split_fused(spec: ModelSpec, view: WeightView) -> WeightView:
    """Cut attn_qkv (Q, K, V rows) and ffn_up (gate rows, up rows) into the tensors of the spec."""
    entries = dict(view.entries)
    for layer, block in enumerate(spec.blocks):
        attention, feed_forward = block.attention, block.feed_forward
        assert not isinstance(feed_forward, MixtureOfExperts)
        kv_rows = attention.num_kv_heads * attention.head_dim
        qkv = {"attn_q": attention.num_heads * attention.head_dim, "attn_k": kv_rows, "attn_v": kv_rows}
        gate_up = {"ffn_gate": feed_forward.hidden, "ffn_up": feed_forward.hidden}
        _cut(entries, f"blk.{layer}.", "attn_qkv", qkv)
        if f"blk.{layer}.ffn_gate.weight" not in entries:
            _cut(entries, f"blk.{layer}.", "ffn_up", gate_up)
    return WeightView(view.source, entries)


def _cut(entries: dict[str, ViewEntry], stem: str, fused: str, rows: dict[str, int]) -> None:
    entry = entries.pop(f"{stem}{fused}.weight", None)
    if entry is None:
        return
    total = sum(rows.values())
    if entry.info.shape[:1] != (total,):
        raise FormatError(f"tensor {stem}{fused}.weight has shape {entry.info.shape}; expected {total} rows")
    first = 0
    for name, count in rows.items():
        entries[f"{stem}{name}.weight"] = row_slice(entry, f"{stem}{name}.weight", first, count)
        first += count
