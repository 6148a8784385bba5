"""Falcon: parallel blocks with one layer norm or two, few KV heads or one, Q, K and V of each KV head stored as one."""

from __future__ import annotations

from dataclasses import replace

from kvarn.errors import FormatError
from kvarn.formats.tensor_view import ViewEntry, WeightView, gathered
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Attention, Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm
from kvarn.models.tensors.fused import SUFFIXES


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Falcon; models without rotation (alibi) are refused by that key."""
    dims = read_dimensions(hparams, hidden=4 * hparams.integer("width"))
    dims = replace(dims, num_kv_heads=_kv_heads(hparams, dims))
    norm, has_bias = layer_norm(hparams, has_bias=True), hparams.flag(None, "bias", default=False)
    if hparams.is_gguf:
        has_bias = hparams.has_tensor("blk.0.attn_qkv.bias")
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    is_new = hparams.flag(None, "new_decoder_architecture", default=False)
    hparams.raw(None, "num_ln_in_parallel_attn")  # the tensors say it, and one norm serves for both
    is_parallel = hparams.flag(None, "parallel_attn", default=True)
    if is_new and not is_parallel:
        raise hparams.unsupported("new_decoder_architecture without parallel_attn", "parallel_attn")
    activation = hparams.activation("gelu")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=has_bias, output_bias=has_bias),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=has_bias),
            norm=norm,
            placement="parallel" if is_parallel else "pre",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def _kv_heads(hparams: HParams, dims: Dimensions) -> tuple[int, ...]:
    """config.json's number counts for new models only; old ones have one, or one for each head."""
    is_one = hparams.flag(None, "multi_query", default=True)
    if hparams.is_gguf or hparams.flag(None, "new_decoder_architecture", default=False):
        return dims.num_kv_heads
    return (1,) * dims.num_layers if is_one else dims.num_heads


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """Gather the rows of Q, K and V, which safetensors hold by KV head; GGUF's second norm is that of attention."""
    entries = dict(view.entries)
    has_second = any(".attn_norm_2." in name for name in entries)
    for layer, block in enumerate(spec.blocks):
        for suffix in SUFFIXES:
            if view.metadata.get("hf") is not None:
                _take_apart(entries, f"blk.{layer}.", suffix, block.attention)
            second = entries.pop(f"blk.{layer}.attn_norm_2.{suffix}", None)
            if second is None and has_second:
                raise FormatError(f"tensor blk.{layer}.attn_norm_2.{suffix} is missing; other layers have it")
            if second is not None and (first := entries.pop(f"blk.{layer}.attn_norm.{suffix}", None)):
                for entry, name in ((first, "ffn_norm"), (second, "attn_norm")):
                    full = f"blk.{layer}.{name}.{suffix}"
                    entries[full] = replace(entry, info=replace(entry.info, name=full))
    return WeightView(view.source, entries)


def _take_apart(entries: dict[str, ViewEntry], stem: str, suffix: str, attention: Attention) -> None:
    fused = entries.pop(f"{stem}attn_qkv.{suffix}", None)
    if fused is None:
        return
    size, groups = attention.head_dim, attention.num_kv_heads
    ratio = attention.num_heads // groups
    if fused.info.shape[0] != groups * (ratio + 2) * size:
        raise FormatError(
            f"tensor {fused.info.name} has shape {fused.info.shape}; expected {groups} times "
            f"{ratio + 2} heads of {size} rows"
        )
    starts = [group * (ratio + 2) * size for group in range(groups)]
    for part, first, count in (("q", 0, ratio), ("k", ratio, 1), ("v", ratio + 1, 1)):
        name = f"{stem}attn_{part}.{suffix}"
        entries[name] = gathered(fused, name, [(start + first * size, count * size) for start in starts])
