"""GLM-4: neighbours rotated in half of each head, gate and up as one; those of 0414 with norms behind each sublayer."""

from __future__ import annotations

from typing import Literal

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a GLM-4 of 0414; GGUF says by tensors whether Q, K and V have biases."""
    return _describe(hparams, "sandwich")


def describe_first(hparams: HParams) -> ModelSpec:
    """Describe the first GLM-4, or a GLM-Edge; GGUF files of its authors' layout have Q, K and V as one."""
    return _describe(hparams, "pre")


def _describe(hparams: HParams, placement: Literal["pre", "sandwich"]) -> ModelSpec:
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved", dims.head_dim, dims.context_length)
    has_bias = any(hparams.has_tensor(f"blk.0.{name}.bias") for name in ("attn_q", "attn_qkv"))
    if not hparams.is_gguf:
        has_bias = hparams.flag(None, "attention_bias", default=True)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=has_bias),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
            placement=placement,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
