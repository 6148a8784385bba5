"""Qwen2 and Qwen2.5: a Llama with biases on Q, K and V."""

from __future__ import annotations

from kvarn.models.dimensions import Dimensions, decoder, read_sizes, rms_norm, window_layers
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec


def describe(facts: HParams) -> ModelSpec:
    """Describe a Qwen2."""
    sizes, norm = read_sizes(facts), rms_norm(facts)
    rope = read_rope(facts, "half", sizes.head_dim, sizes.context)
    activation, windows = facts.activation("silu"), late_windows(facts, sizes)
    blocks = tuple(
        Block(
            attention=sizes.attention(layer, rope, window=windows[layer], qkv_bias=True),
            feed_forward=FeedForward(sizes.hidden[layer], activation),
            norm=norm,
        )
        for layer in range(sizes.blocks)
    )
    return decoder(facts, sizes, blocks, norm)


def late_windows(facts: HParams, sizes: Dimensions) -> tuple[int | None, ...]:
    """Give each layer's window: Qwen turns it on by a flag, from a certain layer on."""
    window = facts.count("window", default=0)
    is_on = window > 0 and facts.flag(None, "use_sliding_window", default=facts.is_gguf)
    first = facts.count("first_window_layer", default=0 if facts.is_gguf else sizes.blocks)
    usual = tuple(layer >= first for layer in range(sizes.blocks))
    return tuple(window if is_on and has else None for has in window_layers(facts, sizes, usual))
