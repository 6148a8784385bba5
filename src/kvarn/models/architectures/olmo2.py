"""OLMo 2 and OLMo 3: norms behind each sublayer, and over all heads of Q and K; OLMo 3 with windows in most layers."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope, unscaled_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, every_nth_full, rms_norm, window_layers

PERIOD = 4  # every fourth layer of OLMo 3 sees everything


def describe(hparams: HParams) -> ModelSpec:
    """Describe an OLMo 2, or an OLMo 3: the one with a window, whose windowed layers have an unscaled rope."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    window: int | None = hparams.integer("sliding_window", default=0) or None
    usual = (False,) * dims.num_layers if window is None else every_nth_full(dims, PERIOD)
    windowed = window_layers(hparams, dims, usual)
    ropes = {False: read_rope(hparams, "half", dims.head_dim, dims.context_length)}
    if any(windowed):
        ropes[True] = unscaled_rope(hparams, "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = attention_biases(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                ropes[windowed[layer]],
                window=window if windowed[layer] else None,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm=norm,
                qk_norm_span="row",
            ),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
            placement="post",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
