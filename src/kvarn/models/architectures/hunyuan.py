"""HunYuan, dense: a Llama with norms over each head of Q and K behind the rotation, whose base may be stretched."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a dense HunYuan."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = attention_biases(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer, rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=norm, qk_norm_after_rope=True
            ),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
