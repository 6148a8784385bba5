"""GLM-4 (0414): norms before and after each sublayer, neighbours rotated in half of each head, gate and up as one."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a GLM-4; GGUF says by tensors whether Q, K and V have biases."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved", dims.head_dim, dims.context_length)
    has_bias = hparams.has_tensor("blk.0.attn_q.bias")
    if not hparams.is_gguf:
        has_bias = hparams.flag(None, "attention_bias", default=True)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=has_bias),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
            placement="sandwich",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
