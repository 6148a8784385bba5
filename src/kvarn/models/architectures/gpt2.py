"""GPT-2: learned positions, layer norms, biases everywhere; safetensors hold its matrices transposed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvarn.errors import FormatError
from kvarn.formats.recast_weights import Rearranged, RearrangedWeights
from kvarn.formats.tensor_view import WeightView, renamed
from kvarn.formats.weights import conversions
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, FeedForward, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm

TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def describe(hparams: HParams) -> ModelSpec:
    """Describe a GPT-2; its feed-forward is four times as wide as its states where config.json does not say."""
    dims = read_dimensions(hparams, hidden=4 * hparams.integer("width"))
    norm, activation = layer_norm(hparams, has_bias=True), hparams.activation("gelu_tanh")
    if hparams.flag(None, "scale_attn_by_inverse_layer_idx", default=False):
        raise hparams.unsupported("scale_attn_by_inverse_layer_idx is true", "scale_attn_by_inverse_layer_idx")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, None, qkv_bias=True, output_bias=True),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=True),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm, embedding=InputEmbedding(positions=dims.context_length))


def transpose(spec: ModelSpec, view: WeightView) -> WeightView:  # noqa: ARG001 - the names say it
    """Turn the matrices of a safetensors folder round."""
    if view.metadata.get("hf") is None:
        return view
    if conversions(view.source):
        raise FormatError("a quantised GPT-2 is not read, because its matrices are stored transposed", file=view.path)
    made, entries = {}, dict(view.entries)
    for name, entry in view.entries.items():
        if name.endswith(TRANSPOSED) and len(entry.info.shape) == 2:
            origin, info = entry.parts[0].tensor, replace(entry.info, shape=entry.info.shape[::-1])
            made[origin] = Rearranged(replace(info, name=origin), origin, np.transpose)
            entries[name] = renamed(made[origin].info, name)
    return WeightView(RearrangedWeights(view.source, made), entries)
