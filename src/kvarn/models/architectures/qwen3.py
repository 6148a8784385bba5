"""Qwen3 and Qwen3-MoE: no biases, a norm over each head of Q and K, and for some a layer of experts."""

from __future__ import annotations

from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.architectures.qwen2 import late_windows
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Qwen3, dense or with experts."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    windows, (qkv_bias, output_bias) = late_windows(hparams, dims), attention_biases(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                rope,
                window=windows[layer],
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm=norm,
            ),
            feed_forward=_feed_forward(hparams, dims, layer),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def _feed_forward(hparams: HParams, dims: Dimensions, layer: int) -> FeedForward | MixtureOfExperts:
    num_experts = hparams.integer("num_experts", default=0)
    if num_experts == 0 or not is_sparse(hparams, layer):
        return FeedForward(dims.hidden[layer], hparams.activation("silu"))
    is_usual = hparams.is_gguf or not hparams.has_key("norm_topk_prob")  # types without the key have it on
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=is_usual)
    return mixture_of_experts(hparams, num_experts, hparams.integer("expert_hidden"), renormalise=renormalise)


def is_sparse(hparams: HParams, layer: int) -> bool:
    """Whether a layer has experts."""
    dense = hparams.raw(None, "mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise hparams.format_error(f"mlp_only_layers is {dense!r}; expected a list of layers")
    return layer not in dense and (layer + 1) % hparams.integer("decoder_sparse_step", default=1) == 0
