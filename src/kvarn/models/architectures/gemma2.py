"""Gemma 2: norms before and after each sublayer, soft caps on scores and logits, every other layer windowed."""

from __future__ import annotations

import math

from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, Head, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import decoder, rms_norm, window_layers

LAYERS_OF_27B = 46


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Gemma 2."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    windowed = window_layers(hparams, dims, tuple(layer % 2 == 0 for layer in range(dims.num_layers)))
    window, cap = hparams.integer("sliding_window") or None, hparams.number("attn_softcap", default=0.0) or None
    scale, activation = query_scale(hparams, dims, LAYERS_OF_27B), hparams.activation("gelu_tanh")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, scale=scale, softcap=cap, window=window if windowed[layer] else None),
            feed_forward=FeedForward(dims.hidden[layer], activation),
            norm=norm,
            placement="sandwich",
        )
        for layer in range(dims.num_layers)
    )
    logit_cap = hparams.number("final_softcap", default=0.0) or None
    embedding, head = InputEmbedding(scale=math.sqrt(dims.width)), Head(tied=True, softcap=logit_cap)
    return decoder(hparams, dims, blocks, norm, embedding=embedding, head=head)


def query_scale(hparams: HParams, dims: Dimensions, layers_of_27b: int) -> float:
    """Return the scale of the scores. GGUF does not record it: only the 27B departs from head_dim."""
    usual = dims.width // dims.num_heads[0] if hparams.is_gguf and dims.num_layers == layers_of_27b else dims.head_dim
    return float(1.0 / math.sqrt(hparams.number("query_pre_attn_scalar", default=usual)))
