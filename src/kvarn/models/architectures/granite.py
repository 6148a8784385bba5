"""Granite: a Llama, in some models with experts, and four multipliers, of the embedding, the scores, what each sublayer
adds, and the logits."""

from __future__ import annotations

from kvarn.models.architectures.llama import feed_forward
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, Head, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Granite; GGUF files hold Q and K permuted for interleaved rotation, safetensors do not."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved" if hparams.is_gguf else "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = attention_biases(hparams)
    scale, residual = hparams.number("attention_scale"), hparams.number("residual_scale", default=1.0)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, scale=scale, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=feed_forward(hparams, dims, layer),
            norm=norm,
            residual_scale=residual,
        )
        for layer in range(dims.num_layers)
    )
    embedding = InputEmbedding(scale=hparams.number("embedding_scale", default=1.0))
    head = Head(tied=False, scale=1.0 / hparams.number("logit_scale", default=1.0))  # the logits are divided by it
    return decoder(hparams, dims, blocks, norm, embedding=embedding, head=head)
