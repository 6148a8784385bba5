"""Llama and its relatives: SmolLM2, Llama 3, Mistral (sliding window), Mixtral (experts)."""

from __future__ import annotations

from kvarn.models.dimensions import Dimensions, decoder, read_sizes, rms_norm, window_layers
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, ModelSpec


def describe(facts: HParams) -> ModelSpec:
    """Describe a Llama; GGUF files hold Q and K permuted for interleaved rotation, safetensors do not."""
    sizes, norm = read_sizes(facts), rms_norm(facts)
    rope = read_rope(facts, "interleaved" if facts.is_gguf else "half", sizes.head_dim, sizes.context)
    window = facts.count("window", default=0) or None
    windowed = window_layers(facts, sizes, (window is not None,) * sizes.blocks)
    bias = facts.has("blk.0.attn_q.bias")
    blocks = tuple(
        Block(
            attention=sizes.attention(
                layer, rope, window=window if windowed[layer] else None, qkv_bias=bias, output_bias=_output_bias(facts)
            ),
            feed_forward=_feed_forward(facts, sizes, layer),
            norm=norm,
        )
        for layer in range(sizes.blocks)
    )
    return decoder(facts, sizes, blocks, norm)


def _output_bias(facts: HParams) -> bool:
    return facts.has("blk.0.attn_output.bias")


def _feed_forward(facts: HParams, sizes: Dimensions, layer: int) -> FeedForward | MixtureOfExperts:
    activation = facts.activation("silu")
    num_experts = facts.count("experts", default=0)
    if num_experts == 0:
        return FeedForward(sizes.hidden[layer], activation)
    return mixture(facts, num_experts, sizes.hidden[layer], renormalise=True)


def mixture(facts: HParams, num_experts: int, hidden: int, *, renormalise: bool) -> MixtureOfExperts:
    """Describe a layer of experts."""
    num_active = facts.count("active_experts")
    if not 1 <= num_active <= num_experts:
        raise facts.wrong(f"{num_active} of {num_experts} experts are active; expected 1 to {num_experts}")
    return MixtureOfExperts(num_experts, num_active, hidden, facts.activation("silu"), renormalise)
