"""Ministral and Ministral 3: a Llama, with windows in some layers or with sharpened queries of far positions."""

from __future__ import annotations

from collections.abc import Mapping

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec, Temperature
from kvarn.models.spec_builder import decoder, rms_norm, window_layers


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Ministral 3; GGUF files hold Q and K permuted for interleaved rotation, safetensors do not."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved" if hparams.is_gguf else "half", dims.head_dim, dims.context_length)
    window, temperature = hparams.integer("sliding_window", default=0) or None, _temperature(hparams)
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


def _temperature(hparams: HParams) -> Temperature | None:
    """It grows with every stretch of the context that the model was first trained with."""
    given = None if hparams.is_gguf else hparams.raw(None, "rope_parameters") or hparams.raw(None, "rope_scaling") or {}
    if given is not None and not isinstance(given, Mapping):
        raise hparams.format_error("rope_parameters must be an object")
    beta = hparams.number("temperature_beta", default=0.0, table=given)
    return Temperature(hparams.integer("rope_original_context", table=given), beta) if beta else None
