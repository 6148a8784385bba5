"""dots.llm1: a Qwen3's attention with the experts of GLM-4.5; windows in layers from some number on."""

from __future__ import annotations

from kvarn.models.architectures.glm4_moe import sigmoid_experts
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm, window_layers


def describe(hparams: HParams) -> ModelSpec:
    """Describe a dots.llm1."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    window: int | None = hparams.integer("sliding_window", default=0) or None
    first = hparams.integer("first_window_layer", default=dims.num_layers)
    usual = tuple(window is not None and layer >= first for layer in range(dims.num_layers))
    windowed, (qkv_bias, output_bias) = window_layers(hparams, dims, usual), attention_biases(hparams)
    num_dense, experts = hparams.integer("num_dense_layers", default=0), sigmoid_experts(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                rope,
                window=window if windowed[layer] else None,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm=norm,
            ),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")) if layer < num_dense else experts,
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
