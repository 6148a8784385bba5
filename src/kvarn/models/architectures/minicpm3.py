"""MiniCPM3: latent attention in a dense model whose embeddings, residuals and logits are scaled."""

from __future__ import annotations

import math

from kvarn.models.architectures.deepseek import latent_attention, latent_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, FeedForward, Head, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import decoder, rms_norm

# Of the one that was published: GGUF has no keys for them.
EMBEDDING_SCALE, DEPTH_SCALE, BASE_WIDTH = 12.0, 1.4, 256


def describe(hparams: HParams) -> ModelSpec:
    """Describe a MiniCPM3; null in config.json means that a part is not scaled."""
    dims, norm = latent_dimensions(hparams), rms_norm(hparams)
    attention = latent_attention(hparams, dims, is_half=True)
    embedding_scale, depth_scale, base_width = EMBEDDING_SCALE, DEPTH_SCALE, BASE_WIDTH
    if not hparams.is_gguf:
        embedding_scale = hparams.number("embedding_scale")
        depth_scale = hparams.number("depth_scale", default=math.sqrt(dims.num_layers))
        base_width = hparams.integer("base_width", default=dims.width)
    blocks = tuple(
        Block(
            mixer=attention,
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
            residual_scale=depth_scale / math.sqrt(dims.num_layers),
        )
        for layer in range(dims.num_layers)
    )
    head = Head(tied=False, scale=base_width / dims.width)
    return decoder(hparams, dims, blocks, norm, embedding=InputEmbedding(scale=embedding_scale), head=head)
