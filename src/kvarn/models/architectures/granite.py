"""Granite and HyperCLOVA X: a Llama, in some models with experts, and four multipliers, of the embedding, the scores,
what each sublayer adds, and the logits; HyperCLOVA X with norms behind each sublayer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from kvarn.models.architectures import llama
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, Head, InputEmbedding, MixtureOfExperts, ModelSpec, SharedExpert
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Granite; GGUF files hold Q and K permuted for interleaved rotation, safetensors do not."""
    scale = 1.0 / hparams.number("logit_scale", default=1.0)  # the logits are divided by it
    return _describe(hparams, "pre", hparams.number("attention_scale"), scale)


def describe_hyperclova(hparams: HParams) -> ModelSpec:
    """Describe a HyperCLOVA X."""
    usual = 1.0 / math.sqrt(read_dimensions(hparams).head_dim)
    placement: Literal["pre", "sandwich"] = "pre"
    if hparams.flag(None, "use_post_norm", default=True):
        placement = "sandwich"
    scale = hparams.number("logit_scale", default=1.0)
    return _describe(hparams, placement, hparams.number("attention_scale", default=usual), scale)


def _describe(
    hparams: HParams, placement: Literal["pre", "sandwich"], attention_scale: float, logit_scale: float
) -> ModelSpec:
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved" if hparams.is_gguf else "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = attention_biases(hparams)
    residual = hparams.number("residual_scale", default=1.0)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, scale=attention_scale, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=_feed_forward(hparams, dims, layer),
            norm=norm,
            placement=placement,
            residual_scale=residual,
        )
        for layer in range(dims.num_layers)
    )
    embedding = InputEmbedding(scale=hparams.number("embedding_scale", default=1.0))
    return decoder(hparams, dims, blocks, norm, embedding=embedding, head=Head(tied=False, scale=logit_scale))


def _feed_forward(hparams: HParams, dims: Dimensions, layer: int) -> FeedForward | MixtureOfExperts:
    feed_forward = llama.feed_forward(hparams, dims, layer)
    shared = hparams.integer("shared_hidden", default=0)
    if not shared or isinstance(feed_forward, FeedForward):
        return feed_forward
    return replace(feed_forward, shared=SharedExpert(shared))
