"""Phi-3: a Llama whose Q, K, V and whose gate and up matrices are stored as one; some with LongRoPE."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, one_window, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Phi-3."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    window, activation = one_window(hparams, dims), hparams.activation("silu")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, window=window),
            feed_forward=FeedForward(dims.hidden[layer], activation),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
