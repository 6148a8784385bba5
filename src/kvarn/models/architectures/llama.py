"""Llama and its relatives: SmolLM2, Llama 3, Mistral (sliding window), Mixtral (experts)."""

from __future__ import annotations

from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, ffn_bias, one_window, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Llama; GGUF files hold Q and K permuted for interleaved rotation, safetensors do not."""
    return described(hparams, is_interleaved=hparams.is_gguf)


def describe_interleaved(hparams: HParams) -> ModelSpec:
    """Describe a Helium: a Llama of which folders, too, have neighbours that are rotated."""
    return described(hparams, is_interleaved=True)


def described(hparams: HParams, *, is_interleaved: bool) -> ModelSpec:
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved" if is_interleaved else "half", dims.head_dim, dims.context_length)
    window, (qkv_bias, output_bias) = one_window(hparams, dims), attention_biases(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, window=window, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=feed_forward(hparams, dims, layer),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def feed_forward(hparams: HParams, dims: Dimensions, layer: int) -> FeedForward | MixtureOfExperts:
    """Describe a feed-forward, or experts whose shares are renormalised."""
    activation = hparams.activation("silu")
    num_experts = hparams.integer("num_experts", default=0)
    if num_experts == 0:
        return FeedForward(dims.hidden[layer], activation, bias=ffn_bias(hparams))
    return mixture_of_experts(hparams, num_experts, dims.hidden[layer], renormalise=True)


def mixture_of_experts(hparams: HParams, num_experts: int, hidden: int, *, renormalise: bool) -> MixtureOfExperts:
    """Describe a layer of experts."""
    num_active = hparams.integer("num_active_experts")
    if not 1 <= num_active <= num_experts:
        raise hparams.format_error(f"{num_active} of {num_experts} experts are active; expected 1 to {num_experts}")
    return MixtureOfExperts(num_experts, num_active, hidden, hparams.activation("silu"), renormalise)
