"""Qwen2 and Qwen2.5: a Llama with biases on Q, K and V."""

from __future__ import annotations

from kvarn.models.diffusion.masked import as_masked_diffusion, tokenizer_mask_id
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, rms_norm, window_layers


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Qwen2. Open-dCoder has its config.json; that it fills in masks is said by its tokenizer alone."""
    spec = described(hparams)
    if hparams.is_gguf or tokenizer_mask_id(hparams) is None:
        return spec
    hparams.notes["read as masked diffusion, since the tokenizer has a mask token"] = None
    return as_masked_diffusion(hparams, spec, shift=True)


def described(hparams: HParams) -> ModelSpec:
    """Describe the layers, whatever they are used for."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    activation, windows = hparams.activation("silu"), late_windows(hparams, dims)
    hparams.raw(None, "attention_bias")  # Q, K and V have biases, the output has none, whatever it says
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, window=windows[layer], qkv_bias=True),
            feed_forward=FeedForward(dims.hidden[layer], activation),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def late_windows(hparams: HParams, dims: Dimensions) -> tuple[int | None, ...]:
    """Give each layer's window: Qwen turns it on by a flag, in dense models from a certain layer on."""
    window = hparams.integer("sliding_window", default=0)
    is_on = hparams.flag(None, "use_sliding_window", default=hparams.is_gguf) and window > 0
    first = hparams.integer("first_window_layer", default=0)
    usual = tuple(is_on and layer >= first for layer in range(dims.num_layers))
    windowed = window_layers(hparams, dims, usual)
    # Without the flag a windowed layer has no window; the layers of models with experts are all alike.
    is_free = is_on and (hparams.is_gguf or hparams.has_key("max_window_layers"))
    if windowed != usual and not is_free:
        raise hparams.unsupported("layer_types names windows that the other keys do not turn on", "layer_types")
    return tuple(window if has else None for has in windowed)
