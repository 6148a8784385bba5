"""Hunyuan 3: norms over each head of Q and K, experts chosen by sigmoid scores with a bias, behind dense layers."""

from __future__ import annotations

from dataclasses import replace

from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures.deepseek import sparse_layers
from kvarn.models.architectures.draft_layer import draft_block
from kvarn.models.architectures.glm4_moe import drop_draft_layers, sigmoid_experts, without_draft_layers
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, ffn_bias, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Hunyuan 3; GGUF says by tensors which layers have experts."""
    dims, norm = without_draft_layers(hparams, read_dimensions(hparams)), rms_norm(hparams)
    if ffn_bias(hparams):
        raise hparams.unsupported("mlp_bias is true", "mlp_bias")
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    if hparams.is_gguf:
        is_sparse = tuple(hparams.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(dims.num_layers))
    else:
        is_sparse = sparse_layers(hparams, dims)
    experts, (qkv_bias, output_bias) = sigmoid_experts(hparams), attention_biases(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qk_norm=norm, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=experts if is_sparse[layer] else FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return replace(decoder(hparams, dims, blocks, norm), draft=draft_block(hparams, blocks))


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """Leave out layers that draft tokens; GGUF calls the bias of experts by a name without an ending."""
    entries = dict(drop_draft_layers(spec, view).entries)
    for layer in range(len(spec.blocks)):
        if entry := entries.pop(f"blk.{layer}.exp_probs_b", None):
            name = f"blk.{layer}.exp_probs_b.bias"
            entries[name] = replace(entry, info=replace(entry.info, name=name))
    return WeightView(view.source, entries)
