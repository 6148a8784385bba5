"""StarCoder and SantaCoder: a GPT-2 with one KV head for all, or one for each, in matrices that are not turned."""

from __future__ import annotations

from dataclasses import replace

from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures.gpt_neox import split_heads
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, FeedForward, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a StarCoder; its feed-forward is four times as wide as its states where config.json does not say."""
    dims = read_dimensions(hparams, hidden=4 * hparams.integer("width"))
    is_one = hparams.flag(None, "multi_query", default=True)
    if not hparams.is_gguf:  # whatever num_key_value_heads is
        dims = replace(dims, num_kv_heads=(1,) * dims.num_layers if is_one else dims.num_heads)
    norm, activation = layer_norm(hparams, has_bias=True), hparams.activation("gelu_tanh")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, None, qkv_bias=True, output_bias=True),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=True),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm, embedding=InputEmbedding(positions=dims.context_length))


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """Gather the rows of Q, K and V where they are stored head by head: where each head has its own."""
    attention = spec.blocks[0].attention
    return split_heads(spec, view) if attention.num_kv_heads == attention.num_heads > 1 else view
