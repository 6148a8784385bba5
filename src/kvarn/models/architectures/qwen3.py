"""Qwen3 and Qwen3-MoE: no biases, a norm over each head of Q and K, and for some a layer of experts."""

from __future__ import annotations

from kvarn.models.architectures.llama import mixture
from kvarn.models.architectures.qwen2 import late_windows
from kvarn.models.dimensions import Dimensions, decoder, read_sizes, rms_norm
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, ModelSpec


def describe(facts: HParams) -> ModelSpec:
    """Describe a Qwen3, dense or with experts."""
    sizes, norm = read_sizes(facts), rms_norm(facts)
    rope = read_rope(facts, "half", sizes.head_dim, sizes.context)
    windows = late_windows(facts, sizes)
    bias = facts.has("blk.0.attn_q.bias")
    blocks = tuple(
        Block(
            attention=sizes.attention(
                layer,
                rope,
                window=windows[layer],
                qkv_bias=bias,
                output_bias=facts.has("blk.0.attn_output.bias"),
                qk_norm=norm,
            ),
            feed_forward=_feed_forward(facts, sizes, layer),
            norm=norm,
        )
        for layer in range(sizes.blocks)
    )
    return decoder(facts, sizes, blocks, norm)


def _feed_forward(facts: HParams, sizes: Dimensions, layer: int) -> FeedForward | MixtureOfExperts:
    num_experts = facts.count("experts", default=0)
    if num_experts == 0 or not _is_sparse(facts, layer):
        return FeedForward(sizes.hidden[layer], facts.activation("silu"))
    renormalise = facts.flag("expert_weights_norm", "norm_topk_prob", default=facts.is_gguf)
    return mixture(facts, num_experts, facts.count("expert_hidden"), renormalise=renormalise)


def _is_sparse(facts: HParams, layer: int) -> bool:
    dense = facts.raw(None, "mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise facts.wrong(f"mlp_only_layers is {dense!r}; expected a list of layers")
    return layer not in dense and (layer + 1) % facts.count("sparse_step", default=1) == 0
