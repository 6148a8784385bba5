"""Arcee (AFM) and Nemotron: squared ReLUs without a gate; Nemotron with layer norms and a rotated half of each head."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec, Norm
from kvarn.models.spec_builder import attention_biases, decoder, ffn_bias, layer_norm, rms_norm


def describe_arcee(hparams: HParams) -> ModelSpec:
    """Describe an AFM; GGUF files hold Q and K permuted for interleaved rotation, safetensors do not."""
    return _describe(hparams, rms_norm(hparams), is_permuted=hparams.is_gguf)


def describe_nemotron(hparams: HParams) -> ModelSpec:
    """Describe a Nemotron 4 or Minitron."""
    hparams.raw("attention.layer_norm_rms_epsilon")  # a copy of the other one that GGUF files have
    return _describe(hparams, layer_norm(hparams, has_bias=True), is_permuted=False)


def _describe(hparams: HParams, norm: Norm, *, is_permuted: bool) -> ModelSpec:
    dims, (qkv_bias, output_bias) = read_dimensions(hparams), attention_biases(hparams)
    rope = read_rope(hparams, "interleaved" if is_permuted else "half", dims.head_dim, dims.context_length)
    activation = hparams.activation("relu2")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=ffn_bias(hparams)),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
