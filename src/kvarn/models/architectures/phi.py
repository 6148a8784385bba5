"""Phi-1, Phi-1.5 and Phi-2: parallel blocks with one layer norm, biases everywhere, half of each head rotated."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, Head, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Phi."""
    dims, norm = read_dimensions(hparams), layer_norm(hparams, has_bias=True)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    activation = hparams.activation("gelu_tanh")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=True, output_bias=True),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=True),
            norm=norm,
            placement="parallel",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm, head=Head(tied=False, bias=True))
