"""Trinity (AFMoE): gates behind attention, rotation in windowed layers only, norms on both sides of each sublayer."""

from __future__ import annotations

import math

from kvarn.models.architectures.glm4_moe import sigmoid_experts
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, every_nth_full, rms_norm, window_layers

PERIOD = 4


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Trinity; GGUF does not say that its embeddings are scaled: those of all published ones are."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope, window = read_rope(hparams, "half", dims.head_dim, dims.context_length), hparams.integer("sliding_window")
    period = PERIOD if hparams.is_gguf else hparams.integer("global_layer_period", default=PERIOD)
    windowed = window_layers(hparams, dims, every_nth_full(dims, period))
    qkv_bias, output_bias = attention_biases(hparams)
    num_dense, experts = hparams.integer("num_dense_layers", default=0), sigmoid_experts(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                rope if windowed[layer] else None,
                window=window if windowed[layer] else None,
                qk_norm=norm,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                output_gate=True,
            ),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")) if layer < num_dense else experts,
            norm=norm,
            placement="sandwich",
        )
        for layer in range(dims.num_layers)
    )
    is_scaled = hparams.is_gguf or hparams.flag(None, "mup_enabled", default=False)
    embedding = InputEmbedding(scale=math.sqrt(dims.width) if is_scaled else 1.0)
    return decoder(hparams, dims, blocks, norm, embedding=embedding)
