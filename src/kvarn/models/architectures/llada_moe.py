"""LLaDA-MoE: experts in every layer, a norm over each head of Q and K, attention both ways."""

from __future__ import annotations

from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.diffusion.masked import as_masked_diffusion
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, ModelSpec
from kvarn.models.spec_builder import decoder, rms_norm

MASK_ID = 156895  # of `<|mask|>` in the one vocabulary these models have; not in every config.json


def describe(hparams: HParams) -> ModelSpec:
    """Describe a LLaDA-MoE."""
    hidden = hparams.integer("expert_hidden")
    dims, norm = read_dimensions(hparams, hidden=hidden), rms_norm(hparams)
    _refuse_dense_layers(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=False)
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=renormalise)
    blocks = tuple(
        Block(mixer=dims.attention(layer, rope, qk_norm=norm), feed_forward=experts, norm=norm)
        for layer in range(dims.num_layers)
    )
    return as_masked_diffusion(hparams, decoder(hparams, dims, blocks, norm), shift=False, mask_id=MASK_ID)


def _refuse_dense_layers(hparams: HParams) -> None:
    frequency = hparams.raw(None, "moe_layer_freq")
    steps = frequency if isinstance(frequency, list) else [1 if frequency is None else frequency]
    if any(step != 1 for step in steps):
        raise hparams.unsupported(
            f"moe_layer_freq is {frequency!r:.60}; experts in every layer are known", "moe_layer_freq"
        )
