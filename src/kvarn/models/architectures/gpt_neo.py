"""GPT-Neo: learned positions, windows in every other layer, scores that are not scaled."""

from __future__ import annotations

from typing import Final

from kvarn.checks import short
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, FeedForward, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm

KINDS: Final = ("global", "local")
MOST_LAYERS: Final = 1024


def describe(hparams: HParams) -> ModelSpec:
    """Describe a GPT-Neo; its feed-forward is four times as wide as its states where config.json does not say."""
    dims = read_dimensions(hparams, hidden=4 * hparams.integer("width"))
    norm, activation = layer_norm(hparams, has_bias=True), hparams.activation("gelu_tanh")
    window = hparams.integer("local_window")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, None, scale=1.0, window=window if kind == "local" else None, output_bias=True),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=True),
            norm=norm,
        )
        for layer, kind in enumerate(_kinds(hparams, dims.num_layers))
    )
    return decoder(hparams, dims, blocks, norm, embedding=InputEmbedding(positions=dims.context_length))


def _kinds(hparams: HParams, num_layers: int) -> list[str]:
    """attention_types has pairs of kinds and how often they come: [[["global", "local"], 6]]."""
    hparams.raw(None, "attention_layers")  # the same, written out
    given, kinds = hparams.raw(None, "attention_types"), list[str]()
    for pair in given if isinstance(given, list) else []:
        is_pair = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list)
        if not is_pair or type(pair[1]) is not int or not 0 <= pair[1] * len(pair[0]) <= MOST_LAYERS:
            raise hparams.format_error(f"attention_types has {short(pair)}; expected kinds and a number of times")
        kinds += pair[0] * pair[1]
    if len(kinds) != num_layers or not all(kind in KINDS for kind in kinds):
        raise hparams.format_error(
            f"attention_types is {short(given)}; expected {' or '.join(KINDS)} for each of the {num_layers} layers"
        )
    return kinds
