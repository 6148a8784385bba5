"""OPT and Galactica: learned positions that begin at the third, layer norms, ReLUs or GELUs without a gate."""

from __future__ import annotations

from typing import Final

from kvarn.formats.tensor_view import WeightView, row_slice
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, FeedForward, InputEmbedding, ModelSpec, Norm
from kvarn.models.spec_builder import decoder

POSITION_OFFSET: Final = 2  # rows that no token has
EPSILON: Final = 1e-5  # of torch's layer norm: config.json has none


def describe(hparams: HParams) -> ModelSpec:
    """Describe an OPT; those with norms behind their sublayers (350m) or without weights in norms are refused."""
    dims, norm = read_dimensions(hparams), Norm("layer", EPSILON, has_bias=True)
    activation, has_bias = hparams.activation("relu"), hparams.flag(None, "enable_bias", default=True)
    for key, usual in (
        ("do_layer_norm_before", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ):
        if hparams.flag(None, key, default=usual) is not usual:
            raise hparams.unsupported(f"{key} is {str(not usual).lower()}", key)
    if (narrow := hparams.integer("embedding_width", default=dims.width)) != dims.width:
        message = f"word_embed_proj_dim is {narrow}; an embedding as wide as the states ({dims.width}) is known"
        raise hparams.unsupported(message, "word_embed_proj_dim")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, None, qkv_bias=has_bias, output_bias=has_bias),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=has_bias),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm, embedding=InputEmbedding(positions=dims.context_length))


def drop_position_offset(spec: ModelSpec, view: WeightView) -> WeightView:
    """Leave out the rows of positions that no token has."""
    entry, count = view.entries.get("position_embd.weight"), spec.embedding.positions
    if entry is None or count is None:
        return view
    kept = row_slice(entry, "position_embd.weight", POSITION_OFFSET, count)
    return WeightView(view.source, view.entries | {"position_embd.weight": kept})
