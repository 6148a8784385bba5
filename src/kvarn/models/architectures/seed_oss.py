"""Seed-OSS: a Llama with biases on Q, K and V."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, ffn_bias, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Seed-OSS; GGUF says by tensors which biases there are."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = (hparams.has_tensor(f"blk.0.{name}.bias") for name in ("attn_q", "attn_output"))
    if not hparams.is_gguf:
        qkv_bias = hparams.flag(None, "attention_bias", default=True)
        output_bias = hparams.flag(None, "attention_out_bias", default=False)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu"), bias=ffn_bias(hparams)),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
