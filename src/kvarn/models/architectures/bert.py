"""BERT: a bidirectional encoder with learned positions and norms after each residual, for embeddings."""

from __future__ import annotations

import os
from typing import get_args

from kvarn.checks import short
from kvarn.formats.strict_json import read_object, read_optional, read_optional_list
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, Classifier, Encoder, FeedForward, InputEmbedding, ModelSpec, Norm, Pooling
from kvarn.models.spec_builder import model_name, read_pooling

POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
POOLING_FOLDER = "1_Pooling"
# Normalize: the caller says whether vectors are normalised.
SENTENCE_STEPS = ("Transformer", "Pooling", "Normalize")


def describe(hparams: HParams) -> ModelSpec:
    """Describe a BERT."""
    dims = read_dimensions(hparams)
    norm = Norm("layer", hparams.number("layer_norm_eps"), has_bias=True)
    if hparams.flag("attention.causal", "is_decoder", default=False):
        raise hparams.unsupported("a BERT with causal attention is unknown", "attention.causal")
    attention = dims.attention(0, None, mask="bidirectional", qkv_bias=True, output_bias=True)
    blocks = tuple(
        Block(
            mixer=attention,
            feed_forward=FeedForward(hidden, hparams.activation("gelu"), gated=False, bias=True),
            norm=norm,
            placement="residual",
        )
        for hidden in dims.hidden
    )
    return ModelSpec(
        architecture=hparams.architecture,
        name=model_name(hparams),
        width=dims.width,
        vocab_size=dims.vocab_size,
        context_length=dims.context_length,
        embedding=_embedding(hparams, dims.context_length, norm),
        blocks=blocks,
        output_norm=None,
        head=None,
        generation=_generation(hparams),
    )


def _embedding(hparams: HParams, positions: int, norm: Norm) -> InputEmbedding:
    """Classifiers read pairs of texts: the second one has the second token type."""
    types = hparams.weights.tensors.get("token_types.weight")
    reads_pairs = hparams.has_tensor("cls.output.weight") and types is not None and types.shape[0] > 1
    return InputEmbedding(
        positions=positions, token_types=types is not None, segments=2 if reads_pairs else 1, norm=norm
    )


def _generation(hparams: HParams) -> Encoder:
    if hparams.has_tensor("cls.output.weight"):
        hparams.integer("pooling_type", default=0)  # GGUF says 4, "rank": the classifier always reads the first token
        return Encoder("cls", Classifier(hparams.weights.tensors["cls.output.weight"].shape[0]))
    return Encoder(read_pooling(hparams, default=None) or _folder_pooling(hparams) or "mean")


def _folder_pooling(hparams: HParams) -> Pooling | None:
    """Read what sentence-transformers wrote beside the weights."""
    folder = hparams.weights.metadata.get("hf_folder")
    if folder is None:
        return None
    read = read_object if _names_pooling(hparams, folder) else read_optional
    config = read(os.path.join(folder, POOLING_FOLDER, "config.json"))
    if not config:
        return None
    chosen = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    chosen += [name for key, name in POOLING_FLAGS.items() if config.get(key) is True]
    unknown = [k for k, v in config.items() if k.startswith("pooling_mode_") and v is True and k not in POOLING_FLAGS]
    if unknown or len(chosen) != 1 or chosen[0] not in get_args(Pooling):
        raise hparams.unsupported(f"pooling {unknown or chosen} is unknown; known are mean, cls, last", "pooling_mode")
    pooling: Pooling = chosen[0]
    return pooling


def _names_pooling(hparams: HParams, folder: str) -> bool:
    """Whether modules.json names a pooling; a step that makes other vectors of the pooled ones is refused."""
    steps = [
        (str(step.get("type")).rpartition(".")[2], step.get("path"))
        for step in read_optional_list(os.path.join(folder, "modules.json"))
    ]
    for kind, path in steps:
        if kind not in SENTENCE_STEPS:
            known = ", ".join(SENTENCE_STEPS)
            raise hparams.unsupported(f"modules.json has the step {short(kind)}; known are {known}", "modules.json")
        if kind == "Pooling" and path != POOLING_FOLDER:
            raise hparams.format_error(f"modules.json has the pooling in {short(path)}; expected {POOLING_FOLDER}")
    return any(kind == "Pooling" for kind, _ in steps)
