"""Gemma 4: windowed and global layers with heads of their own sizes, the last of them on the keys of earlier ones,
an input for every layer, and in some models experts beside the feed-forward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvarn.checks import short
from kvarn.errors import FormatError
from kvarn.formats.tensor_view import ViewEntry, WeightView, changed
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.residual import PerLayerEmbedding, PerLayerInput
from kvarn.models.rope import frequencies, gguf_magnitude, read_rope, rope
from kvarn.models.spec import (
    Attention,
    Block,
    FeedForward,
    Head,
    InputEmbedding,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    Rope,
)
from kvarn.models.spec_builder import attention_biases, decoder, every_nth_full, rms_norm, window_layers
from kvarn.models.tensors.fused import share_tensor

PERIOD = 6  # every sixth layer is global, and the last one
OVERRIDES = {"head_dim", "num_key_value_heads"}


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Gemma 4 (its text part)."""
    seen = hparams.raw(None, "use_bidirectional_attention")
    if seen not in (None, False, "vision"):  # of images
        raise hparams.unsupported(f"use_bidirectional_attention is {short(seen)}", "use_bidirectional_attention")
    has_experts, ties_values = (
        hparams.flag(None, key, default=False) for key in ("enable_moe_block", "attention_k_eq_v")
    )
    return describe_stack(hparams, has_experts=has_experts, ties_values=ties_values)


def describe_stack(hparams: HParams, *, has_experts: bool, ties_values: bool) -> ModelSpec:
    """What config.json may say of a model type: experts beside feed-forwards; keys as values of global layers."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    windowed = window_layers(hparams, dims, (*every_nth_full(dims, PERIOD)[:-1], False))
    if windowed[-1]:
        raise hparams.unsupported("the last layer has a window; that of a Gemma 4 is global", "layer_types")
    per_layer = read_per_layer(hparams, dims, norm)
    activation, experts = hparams.activation("gelu_tanh"), _experts(hparams, has_experts)
    gate = None if per_layer is None else PerLayerInput(per_layer.length, activation)
    sources, heads = kv_sources(hparams, windowed), _heads(hparams, dims, windowed, ties_values)
    layers = list(zip(windowed, sources, heads, strict=True))
    wide = 2 if hparams.flag(None, "use_double_wide_mlp", default=False) else 1
    blocks = tuple(
        Block(
            mixer=attention,
            feed_forward=FeedForward(dims.hidden[layer] * (1 if sources[layer] is None else wide), activation),
            norm=norm,
            placement="sandwich",
            beside=experts,
            per_layer=gate,
            output_scale=hparams.has_some("layer_output_scale.weight"),
        )
        for layer, attention in enumerate(_attentions(hparams, dims, norm, layers))
    )
    cap = hparams.number("final_softcap", default=0.0) or None
    embedding = InputEmbedding(scale=math.sqrt(dims.width), per_layer=per_layer)
    return decoder(hparams, dims, blocks, norm, embedding=embedding, head=Head(tied=True, softcap=cap))


def kv_sources(hparams: HParams, windowed: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The layer whose keys each layer reads: of the last ones, the last of its kind before them; None: its own."""
    first = len(windowed) - hparams.integer("num_shared_kv_layers", default=0)
    last_of = {kind: layer for layer, kind in enumerate(windowed[: max(first, 0)])}
    missing = [layer for layer in range(max(first, 0), len(windowed)) if windowed[layer] not in last_of]
    if missing:
        raise hparams.format_error(f"layer {missing[0]} shares the keys of an earlier layer of its kind; there is none")
    return tuple(None if layer < first else last_of[kind] for layer, kind in enumerate(windowed))


def read_per_layer(hparams: HParams, dims: Dimensions, norm: Norm) -> PerLayerEmbedding | None:
    """What the layers get beside the residual stream, if anything."""
    length = hparams.integer("per_layer_length", default=0)
    vocab_size = hparams.integer("per_layer_vocab_size", default=dims.vocab_size)
    return PerLayerEmbedding(length, vocab_size, norm) if length else None


def _attentions(
    hparams: HParams, dims: Dimensions, norm: Norm, layers: Sequence[tuple[bool, int | None, tuple[int, int]]]
) -> tuple[Attention, ...]:
    """layers: whether each has a window, whose keys it reads, and its head_dim and KV heads."""
    window, (qkv_bias, output_bias) = hparams.integer("sliding_window") or None, attention_biases(hparams)
    kinds = dict.fromkeys((is_windowed, head_dim) for is_windowed, _, (head_dim, _) in layers)
    ropes = {kind: _rope(hparams, dims, *kind) for kind in kinds}
    return tuple(
        Attention(
            num_heads=dims.num_heads[layer],
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=1.0,
            rope=ropes[is_windowed, head_dim],
            window=window if is_windowed else None,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=norm,
            value_norm_eps=norm.eps,
            kv_source=source,
        )
        for layer, (is_windowed, source, (head_dim, kv_heads)) in enumerate(layers)
    )


def _heads(hparams: HParams, dims: Dimensions, windowed: tuple[bool, ...], ties_values: bool) -> list[tuple[int, int]]:
    """(head_dim, KV heads) of each layer: global layers have their own, all alike or as listed by layer."""
    small, full = (hparams.integer(f"head_dim_{kind}", default=dims.head_dim) for kind in ("window", "full"))
    if hparams.integer("value_dim_window", default=small) != small:
        raise hparams.unsupported("keys and values differ in size", "attention.value_length_swa")
    few = hparams.integer("num_kv_heads_full", default=None)
    is_few = ties_values and few is not None
    usual = {
        str(layer): {"head_dim": full} | ({"num_key_value_heads": few} if is_few else {})
        for layer, is_windowed in enumerate(windowed)
        if not is_windowed
    }
    listed = hparams.raw(None, "per_layer_config") or usual
    found = []
    for layer in range(dims.num_layers):
        own = listed.get(str(layer), {}) if isinstance(listed, Mapping) else None
        if not isinstance(own, Mapping) or own.keys() - OVERRIDES:
            raise hparams.unsupported(
                f"per_layer_config is {short(listed)}; of a layer it may have head_dim and num_key_value_heads",
                "per_layer_config",
            )
        head_dim, kv_heads = own.get("head_dim", small), own.get("num_key_value_heads", dims.num_kv_heads[layer])
        if not all(isinstance(one, int) and 1 <= one <= 2**14 for one in (head_dim, kv_heads)):
            raise hparams.format_error(f"per_layer_config of layer {layer} is {short(own)}; expected numbers")
        if dims.num_heads[layer] % kv_heads:
            raise hparams.format_error(f"layer {layer} has {dims.num_heads[layer]} heads and {kv_heads} KV heads")
        found.append((head_dim, kv_heads))
    return found


def _rope(hparams: HParams, dims: Dimensions, is_windowed: bool, head_dim: int) -> Rope:
    if not is_windowed:
        return read_rope(hparams, "half", head_dim, dims.context_length)
    if not hparams.is_gguf:
        return read_rope(hparams, "half", head_dim, dims.context_length, kind="sliding_attention")
    base, rotated = hparams.number("rope_base_local", default=10000.0), hparams.integer("rope_dims_window", head_dim)
    return rope("half", frequencies(base, rotated), gguf_magnitude(hparams))


def _experts(hparams: HParams, has_experts: bool) -> MixtureOfExperts | None:
    num_experts = hparams.integer("num_experts", default=0)
    if num_experts == 0 or not (hparams.is_gguf or has_experts):
        return None
    experts = mixture_of_experts(hparams, num_experts, hparams.integer("expert_hidden"), renormalise=True)
    is_scaled = not hparams.is_gguf or hparams.has_tensor("blk.0.ffn_down_exps.scale")
    return replace(experts, activation=hparams.activation("gelu_tanh"), expert_scale=is_scaled)


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """Drop the keys of layers that share those of others, let keys be values, make the router's scale its norm."""
    config = view.metadata.get("hf")
    return separate_stack(spec, view, config is None or bool(config.get("text_config", config).get("attention_k_eq_v")))


def separate_stack(spec: ModelSpec, view: WeightView, is_tied: bool) -> WeightView:
    """is_tied: keys of global layers are their values where there are no others."""
    entries = dict(view.entries)
    drop_shared_keys(spec, entries)
    for layer, block in enumerate(spec.blocks):
        stem, attention = f"blk.{layer}.", block.attention
        is_tied_here = is_tied and attention.kv_source is None and attention.window is None
        if is_tied_here and f"{stem}attn_v.weight" not in entries:
            share_tensor(entries, f"{stem}attn_k", f"{stem}attn_v")
        if scale := entries.pop(f"{stem}ffn_gate_inp.scale", None):
            if f"{stem}ffn_gate_inp_norm.weight" in entries:
                raise FormatError(f"{stem}ffn_gate_inp has a scale and a norm; expected one of them", file=view.path)
            norm = changed(scale, lambda values: values / math.sqrt(spec.width))
            name = f"{stem}ffn_gate_inp_norm.weight"
            entries[name] = replace(norm, info=replace(norm.info, name=name))
    return WeightView(view.source, entries)


def drop_shared_keys(spec: ModelSpec, entries: dict[str, ViewEntry]) -> None:
    """Some files have keys of layers that share those of others."""
    for layer, block in enumerate(spec.blocks):
        if block.attention.kv_source is not None:
            for name in ("attn_k", "attn_v", "attn_k_norm", "attn_v_norm"):
                entries.pop(f"blk.{layer}.{name}.weight", None)
