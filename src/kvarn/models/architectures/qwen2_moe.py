"""Qwen1.5-MoE and Qwen2-MoE: a Qwen2 with experts, one of which every token meets, as far as its own gate lets it."""

from __future__ import annotations

from dataclasses import replace

from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.architectures.qwen3 import is_sparse
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, ModelSpec, SharedExpert
from kvarn.models.spec_builder import decoder, rms_norm, window_layers


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Qwen2-MoE; its windows, which no published model turns on, are refused."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    if hparams.flag(None, "use_sliding_window", default=False):
        raise hparams.unsupported("use_sliding_window is true; a Qwen2-MoE with windows is unknown", "sliding_window")
    if any(window_layers(hparams, dims, (False,) * dims.num_layers)):
        raise hparams.unsupported("layer_types names windows that the other keys do not turn on", "layer_types")
    qkv_bias = hparams.flag(None, "qkv_bias", default=True)
    experts, activation = _experts(hparams), hparams.activation("silu")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=qkv_bias),
            feed_forward=experts if is_sparse(hparams, layer) else FeedForward(dims.hidden[layer], activation),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def _experts(hparams: HParams) -> MixtureOfExperts:
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=False)
    experts = mixture_of_experts(
        hparams, hparams.integer("num_experts"), hparams.integer("expert_hidden"), renormalise=renormalise
    )
    return replace(experts, shared=SharedExpert(hparams.integer("shared_hidden"), gate=True))
