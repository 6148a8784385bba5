"""HunYuan: a Llama with norms over each head of Q and K behind the rotation, whose base may be stretched; some have
experts, and one that every token meets."""

from __future__ import annotations

from dataclasses import replace

from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, ModelSpec, SharedExpert
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a HunYuan, dense or with experts."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = attention_biases(hparams)
    feed_forward, experts = FeedForward(dims.hidden[0], hparams.activation("silu")), _experts(hparams, dims)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer, rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=norm, qk_norm_after_rope=True
            ),
            feed_forward=feed_forward if experts is None else experts,
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def _experts(hparams: HParams, dims: Dimensions) -> MixtureOfExperts | None:
    if hparams.architecture not in ("hunyuan_v1_moe", "hunyuan-moe"):
        return None
    hidden = hparams.integer("expert_hidden", default=dims.hidden[0])
    shared = hparams.integer("shared_hidden", default=dims.hidden[0])
    if hparams.integer("num_shared_experts", default=1) != 1:
        raise hparams.unsupported("several experts that every token meets; one is known", "expert_shared_count")
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=True)
    return replace(experts, shared=SharedExpert(shared))
