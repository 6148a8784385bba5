"""Nomic BERT: a BERT with rope instead of learned positions and gated feed-forwards, without biases."""

from __future__ import annotations

from kvarn.models.architectures.bert import encoder, input_embedding, refuse_causal
from kvarn.models.dimensions import read_dimensions
from kvarn.models.encoders.sentence_modules import read_encoder
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Activation, Block, FeedForward, ModelSpec, Norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Nomic BERT."""
    dims = read_dimensions(hparams)
    norm = Norm("layer", hparams.number("layer_norm_eps"), has_bias=True)
    refuse_causal(hparams)
    if hparams.has_tensor("cls.output.weight"):
        raise hparams.unsupported("a classifier of this kind of model is unknown", "classifier")
    # Beyond what it was trained with, its authors' code scales the rope anew for each text: no model is run there.
    context = min(dims.context_length, hparams.integer("trained_positions", default=dims.context_length))
    rope = read_rope(hparams, "half", dims.head_dim, context)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, mask="bidirectional"),
            feed_forward=FeedForward(dims.hidden[layer], _activation(hparams)),
            norm=norm,
            placement="residual",
        )
        for layer in range(dims.num_layers)
    )
    pooled = read_encoder(hparams, "mean")
    assert pooled is not None, "there is a default"
    return encoder(
        hparams,
        width=dims.width,
        vocab_size=dims.vocab_size,
        context_length=context,
        embedding=input_embedding(hparams, None, norm),
        blocks=blocks,
        output_norm=None,
        generation=pooled,
    )


def _activation(hparams: HParams) -> Activation:
    """Its authors' files say swiglu for what transformers calls silu."""
    if hparams.raw(None, "activation_function") == "swiglu":
        return "silu"
    return hparams.activation("silu")
