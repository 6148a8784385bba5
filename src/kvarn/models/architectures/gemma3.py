"""Gemma 3: five windowed layers to each global one, with a rope of their own, and norms over Q and K.

EmbeddingGemma is one in which every token sees those after it as well, made for embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvarn.models.architectures.gemma2 import query_scale
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import frequencies, gguf_magnitude, read_rope, rope
from kvarn.models.spec import Block, Encoder, FeedForward, Head, InputEmbedding, Mask, ModelSpec, Rope
from kvarn.models.spec_builder import decoder, rms_norm, window_layers

LAYERS_OF_27B = 62
PATTERN = 6  # every sixth layer is global


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Gemma 3 (its text part)."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    ropes = {False: read_rope(hparams, "half", dims.head_dim, dims.context_length), True: local_rope(hparams, dims)}
    usual = tuple((layer + 1) % _pattern(hparams) != 0 for layer in range(dims.num_layers))
    windowed = window_layers(hparams, dims, usual)
    window = hparams.integer("sliding_window") or None
    mask: Mask = "bidirectional" if _sees_ahead(hparams) else "causal"
    if window is not None and mask == "bidirectional":
        window = window // 2 + 1  # half of it on each side
    scale, activation = query_scale(hparams, dims, LAYERS_OF_27B), hparams.activation("gelu_tanh")
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                ropes[windowed[layer]],
                scale=scale,
                window=window if windowed[layer] else None,
                mask=mask,
                qk_norm=norm,
            ),
            feed_forward=FeedForward(dims.hidden[layer], activation),
            norm=norm,
            placement="sandwich",
        )
        for layer in range(dims.num_layers)
    )
    logit_cap = hparams.number("final_softcap", default=0.0) or None
    embedding, head = InputEmbedding(scale=math.sqrt(dims.width)), Head(tied=True, softcap=logit_cap)
    spec = decoder(hparams, dims, blocks, norm, embedding=embedding, head=head)
    if mask == "bidirectional" and not isinstance(spec.generation, Encoder):
        raise hparams.unsupported(
            "use_bidirectional_attention is true, and no pooling is given (modules.json)", "use_bidirectional_attention"
        )
    return spec


def _sees_ahead(hparams: HParams) -> bool:
    if hparams.is_gguf:
        causal = hparams.flag("attention.causal", "is_causal", default=hparams.architecture == "gemma3")
        if causal != (hparams.architecture == "gemma3"):
            raise hparams.unsupported(f"attention.causal is {causal}", "attention.causal")
        return not causal
    return hparams.flag(None, "use_bidirectional_attention", default=False)


def _pattern(hparams: HParams) -> int:
    pattern = hparams.raw("attention.sliding_window_pattern", "sliding_window_pattern")
    if pattern is None or (hparams.is_gguf and isinstance(pattern, list)):  # one for each layer: window_layers reads it
        return PATTERN
    if not isinstance(pattern, int) or not 1 <= pattern <= 1024:
        raise hparams.unsupported(f"sliding_window_pattern is {pattern!r}; expected a number", "sliding_window_pattern")
    return pattern


def local_rope(hparams: HParams, dims: Dimensions) -> Rope:
    """Build the rope of windowed layers: its own base, never scaled."""
    by_kind = hparams.raw(None, "rope_parameters")
    if isinstance(by_kind, Mapping) and "sliding_attention" in by_kind:
        return read_rope(hparams, "half", dims.head_dim, dims.context_length, kind="sliding_attention")
    local = frequencies(hparams.number("rope_base_local", default=10000.0), dims.head_dim)
    return rope("half", local, gguf_magnitude(hparams))
