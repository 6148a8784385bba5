"""LLaDA-MoE: experts in every layer, a norm over each head of Q and K, attention both ways."""

from __future__ import annotations

from kvarn.models.architectures.llama import mixture
from kvarn.models.dimensions import decoder, read_sizes, rms_norm
from kvarn.models.hparams import HParams
from kvarn.models.masked_diffusion import denoiser
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, ModelSpec

MASK_ID = 156895  # of `<|mask|>` in the one vocabulary these models have; not in every config.json


def describe(facts: HParams) -> ModelSpec:
    """Describe a LLaDA-MoE."""
    hidden = facts.count("expert_hidden")
    sizes, norm = read_sizes(facts, hidden=hidden), rms_norm(facts)
    _refuse_dense_layers(facts)
    rope = read_rope(facts, "half", sizes.head_dim, sizes.context)
    renormalise = facts.flag("expert_weights_norm", "norm_topk_prob", default=False)
    experts = mixture(facts, facts.count("experts"), hidden, renormalise=renormalise)
    blocks = tuple(
        Block(attention=sizes.attention(layer, rope, qk_norm=norm), feed_forward=experts, norm=norm)
        for layer in range(sizes.blocks)
    )
    return denoiser(facts, decoder(facts, sizes, blocks, norm), shift=False, mask_id=MASK_ID)


def _refuse_dense_layers(facts: HParams) -> None:
    frequency = facts.raw(None, "moe_layer_freq")
    if frequency is not None and any(step != 1 for step in ([frequency] if isinstance(frequency, int) else frequency)):
        raise facts.unsupported(
            f"moe_layer_freq is {frequency!r:.60}; experts in every layer are known", "moe_layer_freq"
        )
