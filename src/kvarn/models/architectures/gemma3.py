"""Gemma 3: five windowed layers to each global one, with a rope of their own, and norms over Q and K."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvarn.models.architectures.gemma2 import query_scale
from kvarn.models.dimensions import Dimensions, decoder, read_sizes, rms_norm, window_layers
from kvarn.models.hparams import HParams
from kvarn.models.rope import frequencies, read_rope, rope
from kvarn.models.spec import Block, FeedForward, ModelSpec, Rope

LAYERS_OF_27B = 62
PATTERN = 6  # every sixth layer is global
HF_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
}


def describe(facts: HParams) -> ModelSpec:
    """Describe a Gemma 3 (its text part)."""
    sizes, norm = read_sizes(facts), rms_norm(facts)
    ropes = {False: read_rope(facts, "half", sizes.head_dim, sizes.context), True: _local_rope(facts, sizes)}
    usual = tuple((layer + 1) % _pattern(facts) != 0 for layer in range(sizes.blocks))
    windowed = window_layers(facts, sizes, usual)
    window, cap = facts.count("window") or None, facts.number("score_cap", default=0.0) or None
    scale, activation = query_scale(facts, sizes, LAYERS_OF_27B), facts.activation("gelu_tanh")
    blocks = tuple(
        Block(
            attention=sizes.attention(
                layer,
                ropes[windowed[layer]],
                scale=scale,
                softcap=cap,
                window=window if windowed[layer] else None,
                qk_norm=norm,
            ),
            feed_forward=FeedForward(sizes.hidden[layer], activation),
            norm=norm,
            placement="sandwich",
        )
        for layer in range(sizes.blocks)
    )
    logit_cap = facts.number("logit_cap", default=0.0) or None
    return decoder(facts, sizes, blocks, norm, scale=math.sqrt(sizes.width), softcap=logit_cap)


def _pattern(facts: HParams) -> int:
    pattern = facts.raw("attention.sliding_window_pattern", "sliding_window_pattern")
    if pattern is None:
        return PATTERN
    if not isinstance(pattern, int) or not 1 <= pattern <= 1024:
        raise facts.unsupported(f"sliding_window_pattern is {pattern!r}; expected a number", "sliding_window_pattern")
    return pattern


def _local_rope(facts: HParams, sizes: Dimensions) -> Rope:
    """Build the rope of windowed layers: its own base, never scaled."""
    by_kind = facts.raw(None, "rope_parameters")
    if isinstance(by_kind, Mapping) and "sliding_attention" in by_kind:
        return read_rope(facts, "half", sizes.head_dim, sizes.context, kind="sliding_attention")
    return rope("half", frequencies(facts.number("rope_base_local", default=10000.0), sizes.head_dim))
