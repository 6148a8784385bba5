"""Granite 4 and Bamba: most layers are state spaces, the others attention; every layer has a feed-forward behind it,
in some models experts and one that every token meets."""

from __future__ import annotations

import math
from dataclasses import replace

from kvarn.errors import FormatError
from kvarn.formats.tensor_view import ViewEntry, WeightView, row_slice
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.architectures.mamba2 import flatten_states, is_state_space, read_mamba2
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import (
    Block,
    FeedForward,
    Head,
    InputEmbedding,
    MixtureOfExperts,
    ModelSpec,
    SharedExpert,
)
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Granite 4 or a Bamba; GGUF files hold Q and K permuted for interleaved rotation."""
    dims, norm = read_dimensions(hparams, some_without_heads=True), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved" if hparams.is_gguf else "half", dims.head_dim, dims.context_length)
    is_state = _state_layers(hparams, dims)
    first = next((layer for layer, state in enumerate(is_state) if state), 0)
    seen = next((layer for layer, state in enumerate(is_state) if not state), 0)
    attention = dims.attention(
        seen,
        rope if _is_rotated(hparams) else None,
        scale=hparams.number("attention_scale", default=1.0 / math.sqrt(dims.head_dim)),
    )
    qkv_bias, output_bias = attention_biases(hparams, seen)
    attention = replace(attention, qkv_bias=qkv_bias, output_bias=output_bias)
    state = replace(read_mamba2(hparams, dims.width, first), norm=norm)
    blocks = tuple(
        Block(
            mixer=state if is_state[layer] else attention,
            feed_forward=_feed_forward(hparams, dims, layer),
            norm=norm,
            residual_scale=hparams.number("residual_scale", default=1.0),
        )
        for layer in range(dims.num_layers)
    )
    embedding = InputEmbedding(scale=hparams.number("embedding_scale", default=1.0))
    head = Head(tied=False, scale=1.0 / hparams.number("logit_scale", default=1.0))
    return decoder(hparams, dims, blocks, norm, embedding=embedding, head=head)


def _is_rotated(hparams: HParams) -> bool:
    """A Bamba rotates; a Granite only where it says so."""
    if hparams.is_gguf:
        return hparams.flag("rope.scaling.finetuned", "", default=True)
    if not hparams.has_key("position_embedding_type"):
        return True
    kind = hparams.raw(None, "position_embedding_type")
    if kind not in (None, "nope", "rope"):
        known = "known are rope, nope"
        raise hparams.unsupported(f"position_embedding_type is {kind!r:.60}; {known}", "position_embedding_type")
    return bool(kind == "rope")


def _state_layers(hparams: HParams, dims: Dimensions) -> tuple[bool, ...]:
    if hparams.is_gguf:
        return tuple(heads == 0 for heads in dims.num_kv_heads)
    if hparams.has_key("attn_layer_indices"):
        indices = hparams.raw(None, "attn_layer_indices") or ()
        if not isinstance(indices, list | tuple):
            raise hparams.format_error(f"attn_layer_indices is {indices!r:.60}; expected a list of layers")
        return tuple(layer not in indices for layer in range(dims.num_layers))
    kinds = hparams.raw(None, "layer_types", "layers_block_type")
    if kinds is None:
        return (True,) * dims.num_layers
    if not isinstance(kinds, list | tuple) or len(kinds) != dims.num_layers:
        raise hparams.format_error(f"layer_types must have one entry for each of the {dims.num_layers} layers")
    return tuple(is_state_space(hparams, kind) for kind in kinds)


def _feed_forward(hparams: HParams, dims: Dimensions, layer: int) -> FeedForward | MixtureOfExperts:
    num_experts, activation = hparams.integer("num_experts", default=0), hparams.activation("silu")
    shared = hparams.integer("shared_hidden", default=0)
    if num_experts:
        experts = mixture_of_experts(hparams, num_experts, dims.hidden[layer], renormalise=True)
        return replace(experts, shared=SharedExpert(shared) if shared else None)
    hparams.raw("expert_used_count")  # of none
    is_shared = hparams.has_key("shared_intermediate_size")
    return FeedForward(
        shared if is_shared else dims.hidden[layer], activation, bias=hparams.flag(None, "mlp_bias", default=False)
    )


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """The expert that every token meets is the feed-forward itself where there are no others."""
    view = cut_shared(spec, flatten_states(spec, view))
    if view.metadata.get("hf") is None:
        return view
    entries = dict(view.entries)
    for layer, block in enumerate(spec.blocks):
        stem, ffn = f"blk.{layer}.", block.feed_forward
        if isinstance(ffn, FeedForward):
            for part in ("up", "down"):
                if entry := entries.pop(f"{stem}ffn_{part}_shexp.weight", None):
                    name = f"{stem}ffn_{part}.weight"
                    entries[name] = replace(entry, info=replace(entry.info, name=name))
    return WeightView(view.source, entries)


def cut_shared(spec: ModelSpec, view: WeightView) -> WeightView:
    """Folders have gate and up of the expert that every token meets as one."""
    if view.metadata.get("hf") is None:
        return view
    entries = dict(view.entries)
    for layer, block in enumerate(spec.blocks):
        ffn = block.feed_forward
        if isinstance(ffn, MixtureOfExperts) and ffn.shared is not None:
            _cut_shared(entries, f"blk.{layer}.", ffn.shared.hidden)
    return WeightView(view.source, entries)


def _cut_shared(entries: dict[str, ViewEntry], stem: str, hidden: int) -> None:
    name = f"{stem}ffn_up_shexp.weight"
    entry = entries.get(name)
    if entry is None or f"{stem}ffn_gate_shexp.weight" in entries:
        return
    if entry.info.shape[:1] != (2 * hidden,):
        raise FormatError(f"tensor {name} has shape {entry.info.shape}; expected {2 * hidden} rows")
    for part, first in (("gate", 0), ("up", hidden)):
        entries[f"{stem}ffn_{part}_shexp.weight"] = row_slice(entry, f"{stem}ffn_{part}_shexp.weight", first, hidden)
