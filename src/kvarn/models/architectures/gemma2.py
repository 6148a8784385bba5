"""Gemma 2: norms before and after each sublayer, soft caps on scores and logits, every other layer windowed."""

from __future__ import annotations

import math

from kvarn.models.dimensions import Dimensions, decoder, read_sizes, rms_norm, window_layers
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec

LAYERS_OF_27B = 46


def describe(facts: HParams) -> ModelSpec:
    """Describe a Gemma 2."""
    sizes, norm = read_sizes(facts), rms_norm(facts)
    rope = read_rope(facts, "half", sizes.head_dim, sizes.context)
    windowed = window_layers(facts, sizes, tuple(layer % 2 == 0 for layer in range(sizes.blocks)))
    window, cap = facts.count("window") or None, facts.number("score_cap", default=0.0) or None
    scale, activation = query_scale(facts, sizes, LAYERS_OF_27B), facts.activation("gelu_tanh")
    blocks = tuple(
        Block(
            attention=sizes.attention(
                layer, rope, scale=scale, softcap=cap, window=window if windowed[layer] else None
            ),
            feed_forward=FeedForward(sizes.hidden[layer], activation),
            norm=norm,
            placement="sandwich",
        )
        for layer in range(sizes.blocks)
    )
    logit_cap = facts.number("logit_cap", default=0.0) or None
    return decoder(facts, sizes, blocks, norm, scale=math.sqrt(sizes.width), softcap=logit_cap)


def query_scale(facts: HParams, sizes: Dimensions, layers_of_27b: int) -> float:
    """Give the scale of the scores. GGUF does not record it: of each family only the 27B departs from head_dim."""
    usual = sizes.width // sizes.heads[0] if facts.is_gguf and sizes.blocks == layers_of_27b else sizes.head_dim
    return float(1.0 / math.sqrt(facts.number("query_scalar", default=usual)))
