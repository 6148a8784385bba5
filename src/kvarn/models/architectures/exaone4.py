"""EXAONE 4: norms behind each sublayer and over each head of Q and K; large ones rotate in windowed layers only."""

from __future__ import annotations

from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, every_nth_full, rms_norm, window_layers

PERIOD = 4


def describe(hparams: HParams) -> ModelSpec:
    """Describe an EXAONE 4."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    window: int | None = hparams.integer("sliding_window", default=0) or None
    windowed = window_layers(hparams, dims, usual_windows(hparams, dims, window))
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                rope if window is None or windowed[layer] else None,
                window=window if windowed[layer] else None,
                qk_norm=norm,
            ),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
            placement="post",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def usual_windows(hparams: HParams, dims: Dimensions, window: int | None) -> tuple[bool, ...]:
    """config.json says by a number, or by letters such as LLLG, which layers are windowed."""
    pattern = None if hparams.is_gguf else hparams.raw(None, "sliding_window_pattern")
    if window is None:
        return (False,) * dims.num_layers
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return tuple(pattern[layer % len(pattern)] == "L" for layer in range(dims.num_layers))
    return every_nth_full(dims, PERIOD if hparams.is_gguf else hparams.integer("window_pattern", default=PERIOD))
