"""Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, the others attention with a gate behind it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvarn.errors import FormatError
from kvarn.formats.tensor_view import ViewEntry, WeightView, changed, gathered
from kvarn.models.architectures.glm4_moe import drop_draft_layers
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.architectures.qwen3 import is_sparse
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Attention, Block, FeedForward, MixtureOfExperts, ModelSpec, Norm, SharedExpert
from kvarn.models.spec_builder import attention_biases, decoder, layer_kinds, rms_norm
from kvarn.models.state_layers import GatedDeltaNet


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Qwen3-Next or a Qwen3.5, dense or with experts."""
    dims, norm = read_dimensions(hparams, hidden=1), rms_norm(hparams)
    if hparams.is_gguf:  # which counts the layers that draft tokens ahead
        dims = replace(dims, num_layers=dims.num_layers - hparams.integer("num_draft_layers", default=0))
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = attention_biases(hparams)
    interval = hparams.integer("full_attention_interval", default=4)
    usual = tuple((layer + 1) % interval != 0 for layer in range(dims.num_layers))
    is_linear = layer_kinds(hparams, dims, usual, "linear_attention", "attention.recurrent_layers")
    linear = _delta_net(hparams, norm)
    blocks = tuple(
        Block(
            mixer=linear
            if is_linear[layer]
            else dims.attention(
                layer, rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=norm, output_gate=True
            ),
            feed_forward=_feed_forward(hparams, dims, layer),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def _delta_net(hparams: HParams, norm: Norm) -> GatedDeltaNet:
    key_heads, heads = hparams.integer("num_state_key_heads"), hparams.integer("num_state_heads")
    if (activation := hparams.activation("silu")) != "silu":
        raise hparams.unsupported(f"hidden_act is {activation}, also of the convolutions; silu is known", "hidden_act")
    if heads % key_heads:
        raise hparams.format_error(f"{heads} value heads are not a multiple of the {key_heads} key heads")
    inner = hparams.integer("state_inner", default=None)
    value_dim = hparams.integer("state_value_dim", default=None)
    if value_dim is None:  # GGUF has that of all heads
        if inner is None or inner % heads:
            raise hparams.format_error(f"ssm.inner_size is {inner}; expected a multiple of the {heads} value heads")
        value_dim = inner // heads
    return GatedDeltaNet(
        num_key_heads=key_heads,
        num_value_heads=heads,
        key_dim=hparams.integer("state_key_dim"),
        value_dim=value_dim,
        kernel=hparams.integer("conv_kernel"),
        norm=norm,
        tiled=hparams.is_gguf and hparams.architecture != "qwen3next",
    )


def _feed_forward(hparams: HParams, dims: Dimensions, layer: int) -> FeedForward | MixtureOfExperts:
    num_experts = hparams.integer("num_experts", default=0)
    if num_experts == 0 or not is_sparse(hparams, layer):
        return FeedForward(dims.hidden[layer], hparams.activation("silu"))
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=True)
    experts = mixture_of_experts(hparams, num_experts, hparams.integer("expert_hidden"), renormalise=renormalise)
    return replace(experts, shared=SharedExpert(hparams.integer("shared_hidden"), gate=True))


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """Take apart what is stored as one: Q and its gate, head by head; all inputs of a delta net, by key head."""
    view = drop_draft_layers(spec, view)
    entries = dict(view.entries)
    for layer, block in enumerate(spec.blocks):
        stem = f"blk.{layer}."
        if isinstance(block.mixer, Attention):
            _separate_gate(entries, stem, block.mixer)
        elif isinstance(block.mixer, GatedDeltaNet):
            _separate_delta_net(entries, stem, block.mixer)
    return WeightView(view.source, entries)


def _separate_gate(entries: dict[str, ViewEntry], stem: str, attention: Attention) -> None:
    size, heads = attention.head_dim, range(attention.num_heads)
    for suffix in ("weight", "bias"):
        parts = {
            f"{stem}{name}.{suffix}": [((2 * head + place) * size, size) for head in heads]
            for place, name in enumerate(("attn_q", "attn_gate"))
        }
        _take_apart(entries, f"{stem}attn_q.{suffix}", parts)


def _separate_delta_net(entries: dict[str, ViewEntry], stem: str, layer: GatedDeltaNet) -> None:
    heads, ratio = range(layer.num_key_heads), layer.num_value_heads // layer.num_key_heads
    key, value = layer.key_dim, ratio * layer.value_dim
    starts = ((0, key), (key, key), (2 * key, value), (2 * key + value, value))  # q, k, v and the gate of a key head
    rows = [[(head * 2 * (key + value) + start, count) for head in heads] for start, count in starts]
    parts = {f"{stem}attn_qkv.weight": [*rows[0], *rows[1], *rows[2]], f"{stem}attn_gate.weight": rows[3]}
    _take_apart(entries, f"{stem}ssm_in.weight", parts)
    parts = {
        f"{stem}{name}.weight": [((2 * head + place) * ratio, ratio) for head in heads]
        for place, name in enumerate(("ssm_beta", "ssm_alpha"))
    }
    _take_apart(entries, f"{stem}ssm_ba.weight", parts)
    if entry := entries.pop(f"{stem}ssm_a_log", None):
        entry = changed(entry, lambda values: -np.exp(values))
        _put(entries, replace(entry, info=replace(entry.info, name=f"{stem}ssm_a")))
    flatten_conv(entries, f"{stem}ssm_conv1d.weight")


def _take_apart(entries: dict[str, ViewEntry], name: str, parts: dict[str, list[tuple[int, int]]]) -> None:
    """Make tensors of ranges of rows (first, count) of another one, which are all of its rows."""
    entry = entries.pop(name, None)
    if entry is None:
        return
    total = sum(count for ranges in parts.values() for _, count in ranges)
    if entry.info.shape[:1] != (total,):
        raise FormatError(f"tensor {name} has shape {entry.info.shape}; expected {total} rows")
    for part, ranges in parts.items():
        _put(entries, gathered(entry, part, ranges))


def _put(entries: dict[str, ViewEntry], entry: ViewEntry) -> None:
    if entry.info.name in entries:
        raise FormatError(f"tensor {entry.info.name} is stored twice, alone and as a part of another one")
    entries[entry.info.name] = entry


def flatten_conv(entries: dict[str, ViewEntry], name: str) -> None:
    """(channels, 1, kernel) of safetensors is (channels, kernel)."""
    entry = entries.get(name)
    if entry is not None and len(entry.info.shape) == 3 and entry.info.shape[1] == 1:
        entries[name] = replace(entry, info=replace(entry.info, shape=(entry.info.shape[0], entry.info.shape[2])))
