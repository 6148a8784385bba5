"""Gemma: a Llama with a scaled embedding, a gated GELU and norm weights around zero."""

from __future__ import annotations

import math

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Gemma."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    activation, (qkv_bias, output_bias) = hparams.activation("gelu_tanh"), attention_biases(hparams)
    if activation == "gelu":
        activation = "gelu_tanh"  # what its first config.json meant
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=FeedForward(dims.hidden[layer], activation),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm, embedding=InputEmbedding(scale=math.sqrt(dims.width)))
