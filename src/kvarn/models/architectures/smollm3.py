"""SmolLM3: a Llama in which every fourth layer has no rotary positions."""

from __future__ import annotations

from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, ffn_bias, rms_norm, window_layers

INTERVAL = 4  # GGUF does not record it


def describe(hparams: HParams) -> ModelSpec:
    """Describe a SmolLM3; GGUF files hold Q and K permuted for interleaved rotation, safetensors do not."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved" if hparams.is_gguf else "half", dims.head_dim, dims.context_length)
    rotates, (qkv_bias, output_bias) = rotating_layers(hparams, dims), attention_biases(hparams)
    window: int | None = hparams.integer("sliding_window", default=0) or None
    # The flag says whether there are windows where layer_types does not.
    has_windows = hparams.flag(None, "use_sliding_window", default=False) and window is not None
    windowed = window_layers(hparams, dims, tuple(has_windows and not one for one in rotates))
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                rope if rotates[layer] else None,
                window=window if windowed[layer] else None,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
            ),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu"), bias=ffn_bias(hparams)),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def rotating_layers(hparams: HParams, dims: Dimensions) -> tuple[bool, ...]:
    """config.json has 1 for each layer that rotates, under a name that says the opposite."""
    flags = hparams.raw(None, "no_rope_layers")
    interval = hparams.integer("no_rope_interval", default=INTERVAL)
    if not flags:
        return tuple((layer + 1) % interval != 0 for layer in range(dims.num_layers))
    if not isinstance(flags, list) or len(flags) < dims.num_layers or any(flag not in (0, 1) for flag in flags):
        raise hparams.format_error(f"no_rope_layers must have 0 or 1 for each of the {dims.num_layers} layers")
    return tuple(bool(flag) for flag in flags[: dims.num_layers])
