"""Command R and R7B: parallel blocks with one layer norm, scaled logits; R7B rotates in windowed layers only."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, Head, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, every_nth_full, layer_norm, window_layers

PERIOD = 4


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Command R, or one with windows."""
    dims, norm = read_dimensions(hparams), layer_norm(hparams, has_bias=False)
    rope = read_rope(hparams, "interleaved", dims.head_dim, dims.context_length)
    window: int | None = hparams.integer("sliding_window", default=0) or None
    usual = (False,) * dims.num_layers
    if window is not None:
        period = PERIOD if hparams.is_gguf else hparams.integer("window_pattern", default=PERIOD)
        usual = every_nth_full(dims, period)
    windowed = window_layers(hparams, dims, usual)
    if not hparams.flag(None, "use_gated_activation", default=True):
        raise hparams.unsupported("use_gated_activation is false; these models have a gate", "use_gated_activation")
    qkv_bias, output_bias = attention_biases(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                rope if window is None or windowed[layer] else None,
                window=window if windowed[layer] else None,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
            ),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
            placement="parallel",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm, head=Head(tied=True, scale=hparams.number("logit_scale")))
