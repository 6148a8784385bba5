"""Ministral and Ministral 3: a Llama, with windows in some layers or with sharpened queries of far positions."""

from __future__ import annotations

from kvarn.models.config.rope_entries import rope_entries
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec, Temperature
from kvarn.models.spec_builder import decoder, one_window, rms_norm, window_layers


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Ministral 3; GGUF files hold Q and K permuted for interleaved rotation, safetensors do not."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved" if hparams.is_gguf else "half", dims.head_dim, dims.context_length)
    temperature = _temperature(hparams, dims.context_length)
    window: int | None = hparams.integer("sliding_window", default=0) or None
    if hparams.architecture == "ministral3":  # which has no kinds of layers
        window = one_window(hparams, dims)
    windowed = window_layers(hparams, dims, (window is not None,) * dims.num_layers)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, window=window if windowed[layer] else None, temperature=temperature),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def _temperature(hparams: HParams, context: int) -> Temperature | None:
    """It grows with every stretch of the context that the model was first trained with."""
    table = rope_entries(hparams, "full_attention", context)
    beta = hparams.number("temperature_beta", default=0.0, table=table)
    return Temperature(hparams.integer("rope_original_context", table=table), beta) if beta else None
