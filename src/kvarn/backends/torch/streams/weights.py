"""The weights of what a layer has beside attention and feed-forward: its own input, and other residual streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvarn.models.residual import AltUp, PerLayerEmbedding, PerLayerInput

if TYPE_CHECKING:
    from kvarn.backends.torch.loading.reader import WeightReader
    from kvarn.backends.torch.weights import Linear, NormWeights


@dataclass(frozen=True, slots=True)
class AltUpWeights:
    norm: NormWeights
    router: Linear
    predict: Linear
    correct: Linear
    scale: Tensor | None  # (width)


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    gate: Linear
    projection: Linear


@dataclass(frozen=True, slots=True)
class PerLayerEmbeddingWeights:
    """The inputs of all layers: columns of the table, rows of the projection."""

    spec: PerLayerEmbedding
    tokens: Tensor  # (vocabulary, layers * length)
    projection: Tensor  # (layers * length, width)
    norm: NormWeights


def load_per_layer(reader: WeightReader, stem: str, per_layer: PerLayerInput | None) -> PerLayerWeights | None:
    """Read what lets a layer's own input in."""
    if per_layer is None:
        return None
    return PerLayerWeights(reader.linear(f"{stem}.inp_gate"), reader.linear(f"{stem}.proj"))


def load_per_layer_embedding(
    reader: WeightReader, embedding: PerLayerEmbedding | None
) -> PerLayerEmbeddingWeights | None:
    """Read what gives all layers their inputs."""
    if embedding is None:
        return None
    norm = reader.norm("per_layer_proj_norm", embedding.norm)
    assert norm is not None, "the projection has a norm"
    tokens, projection = (reader.dense(f"per_layer_{name}.weight") for name in ("token_embd", "model_proj"))
    return PerLayerEmbeddingWeights(embedding, tokens, projection, norm)


def load_altup(reader: WeightReader, stem: str, altup: AltUp | None) -> AltUpWeights | None:
    """Read what a layer guesses and corrects the other streams with."""
    if altup is None:
        return None
    norm = reader.norm(f"{stem}.altup_router_norm", altup.norm)
    assert norm is not None, "the router has a norm"
    router, predict, correct = (
        reader.narrow(f"{stem}.altup_{name}") for name in ("router", "predict_coef", "correct_coef")
    )
    scale = reader.vector(f"{stem}.altup_correct_scale.weight") if altup.correct_scale else None
    return AltUpWeights(norm, router, predict, correct, scale)
