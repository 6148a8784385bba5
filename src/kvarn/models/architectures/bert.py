"""BERT and what differs from it by names only, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT.

Bidirectional encoders with learned positions and norms after each residual: for embeddings, and for scoring pairs.
"""

from __future__ import annotations

from typing import Any

from kvarn.formats.tensor_view import WeightView, row_slice
from kvarn.models.dimensions import read_dimensions
from kvarn.models.encoders.pooled import Classifier, ClassifierActivation
from kvarn.models.encoders.sentence_modules import read_encoder
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, Encoder, FeedForward, InputEmbedding, ModelSpec, Norm
from kvarn.models.spec_builder import model_name

ROBERTAS = ("roberta", "xlm-roberta", "camembert")


def describe(hparams: HParams) -> ModelSpec:
    """Describe a BERT."""
    dims = read_dimensions(hparams)
    norm = Norm("layer", hparams.number("layer_norm_eps"), has_bias=True)
    refuse_causal(hparams)
    attention = dims.attention(0, None, mask="bidirectional", qkv_bias=True, output_bias=True)
    activation = hparams.activation("gelu")
    blocks = tuple(
        Block(
            mixer=attention,
            feed_forward=FeedForward(hidden, activation, gated=False, bias=True),
            norm=norm,
            placement="residual",
        )
        for hidden in dims.hidden
    )
    positions = dims.context_length - _position_offset(hparams)
    return encoder(
        hparams,
        width=dims.width,
        vocab_size=dims.vocab_size,
        context_length=positions,
        embedding=input_embedding(hparams, positions, norm),
        blocks=blocks,
        output_norm=None,
        generation=bert_generation(hparams),
    )


def encoder(hparams: HParams, **parts: Any) -> ModelSpec:
    """Put an encoder together."""
    return ModelSpec(architecture=hparams.architecture, name=model_name(hparams), head=None, **parts)


def refuse_causal(hparams: HParams) -> None:
    if hparams.flag("attention.causal", "is_decoder", default=False):
        raise hparams.unsupported(f"{hparams.architecture} with causal attention is unknown", "attention.causal")


def input_embedding(hparams: HParams, positions: int | None, norm: Norm) -> InputEmbedding:
    """Classifiers read pairs of texts: the second one has the second token type."""
    types = hparams.weights.tensors.get("token_types.weight")
    reads_pairs = hparams.has_tensor("cls.output.weight") and types is not None and types.shape[0] > 1
    return InputEmbedding(
        positions=positions, token_types=types is not None, segments=2 if reads_pairs else 1, norm=norm
    )


def drop_position_offset(spec: ModelSpec, view: WeightView) -> WeightView:
    """Leave out the positions that no token of a RoBERTa has; GGUF files come without them."""
    entry, count = view.entries.get("position_embd.weight"), spec.embedding.positions
    if entry is None or count is None or spec.architecture not in ROBERTAS:
        return view
    kept = row_slice(entry, "position_embd.weight", entry.info.shape[0] - count, count)
    return WeightView(view.source, view.entries | {"position_embd.weight": kept})


def _position_offset(hparams: HParams) -> int:
    """The first token of a RoBERTa has the position after the padding token's id."""
    if hparams.is_gguf or hparams.architecture not in ROBERTAS:
        return 0
    rows = hparams.weights.tensors.get("position_embd.weight")
    padding: int = hparams.integer("padding_id")
    if rows is None or padding + 1 >= rows.shape[0]:
        raise hparams.format_error(f"pad_token_id is {padding}; the positions begin after it, and there are none")
    return padding + 1


def bert_generation(hparams: HParams) -> Encoder:
    """A classifier where the model has one, else a vector."""
    output = hparams.weights.tensors.get("cls.output.weight")
    if output is None:
        found = read_encoder(hparams, "mean")
        assert found is not None, "there is a default"
        return found
    hparams.integer("pooling_type", default=0)  # GGUF says 4, "rank": the classifier always reads the first token
    activation: ClassifierActivation = "relu" if hparams.architecture == "distilbert" else "tanh"
    return Encoder("cls", Classifier(output.shape[0], activation, relevant=output.shape[0] - 1))
