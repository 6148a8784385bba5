"""OLMoE: experts in every layer, norms over all heads of Q and K."""

from __future__ import annotations

from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe an OLMoE."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = attention_biases(hparams)
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=False)
    hidden = hparams.integer("expert_hidden", default=dims.hidden[0])
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=renormalise)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer, rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=norm, qk_norm_span="row"
            ),
            feed_forward=experts,
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
