"""MiniMax-M2: experts in every layer chosen by sigmoid scores with a bias, norms over all heads of Q and K."""

from __future__ import annotations

from dataclasses import replace

from kvarn.models.architectures.glm4_moe import require_sigmoid
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, ModelSpec
from kvarn.models.spec_builder import decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a MiniMax-M2."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    require_sigmoid(hparams)
    hidden = hparams.integer("expert_hidden", default=dims.hidden[0])
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=True)
    experts = replace(experts, scoring="sigmoid", selection_bias=True)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qk_norm=norm, qk_norm_span="row"),
            feed_forward=experts,
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
