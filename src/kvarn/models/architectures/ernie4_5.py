"""ERNIE 4.5, dense: a Llama that rotates neighbours, in some models with biases everywhere."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe an ERNIE 4.5; GGUF says by tensors whether there are biases."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved", dims.head_dim, dims.context_length)
    has_bias = hparams.has_tensor("blk.0.attn_q.bias")
    if not hparams.is_gguf:
        has_bias = hparams.flag(None, "use_bias", default=False)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=has_bias, output_bias=has_bias),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu"), bias=has_bias),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
