"""GPT-J: parallel blocks with one layer norm, neighbours rotated in a part of each head, no biases in attention."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import frequencies, rope
from kvarn.models.spec import Block, FeedForward, Head, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm

BASE = 10000.0


def describe(hparams: HParams) -> ModelSpec:
    """Describe a GPT-J."""
    dims, norm = read_dimensions(hparams, hidden=4 * hparams.integer("width")), layer_norm(hparams, has_bias=True)
    rotated, activation = hparams.integer("rotary_dim"), hparams.activation("gelu_tanh")
    if rotated % 2 or rotated > dims.head_dim:
        raise hparams.format_error(f"rotary_dim is {rotated}; expected an even number up to {dims.head_dim}")
    rotation = rope("interleaved", frequencies(BASE, rotated))
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rotation),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=True),
            norm=norm,
            placement="parallel",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm, head=Head(tied=False, bias=True))
