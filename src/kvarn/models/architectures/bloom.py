"""BLOOM: scores that fall with the distance, a norm behind the embedding, Q, K and V of each head stored as one."""

from __future__ import annotations

from kvarn.models.architectures.jina import slopes
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, FeedForward, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a BLOOM; its feed-forward is four times as wide as its states."""
    dims = read_dimensions(hparams, hidden=4 * hparams.integer("width"))
    norm = layer_norm(hparams, has_bias=True)
    key = "apply_residual_connection_post_layernorm"
    if hparams.flag(None, key, default=False):
        raise hparams.unsupported(f"{key}: the norms are in the residual stream", key)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, None, alibi=slopes(heads), qkv_bias=True, output_bias=True),
            feed_forward=FeedForward(dims.hidden[layer], "gelu_tanh", gated=False, bias=True),
            norm=norm,
        )
        for layer, heads in enumerate(dims.num_heads)
    )
    return decoder(hparams, dims, blocks, norm, embedding=InputEmbedding(norm=norm))
