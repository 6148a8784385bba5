"""From one hidden state per token to one vector per text, and what is made of it: dense layers, a classifier.

A text's row is computed by itself, so that no other one changes a bit of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvarn.formats.weights import WeightSource
from kvarn.models.encoders.pooled import Classifier, ClassifierActivation, DenseLayer
from kvarn.models.spec import Encoder, ModelSpec, Norm, Pooling

Float32 = npt.NDArray[np.float32]
_erf = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True, slots=True)
class _Linear:
    """act(weight @ x + bias)."""

    weight: Float32  # (out, in)
    bias: Float32 | None
    activation: ClassifierActivation = "identity"

    @staticmethod
    def read(weights: WeightSource, name: str, *, bias: bool, activation: ClassifierActivation) -> _Linear:
        own = np.array(weights.array(f"{name}.bias"), np.float32) if bias else None
        return _Linear(np.array(weights.array(f"{name}.weight"), np.float32), own, activation)

    def __call__(self, x: Float32) -> Float32:
        y = self.weight @ x
        y = y if self.bias is None else y + self.bias
        if self.activation == "tanh":
            y = np.tanh(y)
        elif self.activation == "relu":
            y = np.maximum(y, np.float32(0))
        elif self.activation == "gelu":
            y = y * (1 + _erf(y / math.sqrt(2)).astype(np.float32)) / 2
        return np.asarray(y, np.float32)


@dataclass(frozen=True, slots=True)
class _LayerNorm:
    weight: Float32
    bias: Float32 | None
    eps: float

    @staticmethod
    def read(weights: WeightSource, name: str, norm: Norm) -> _LayerNorm:
        assert norm.kind == "layer", "no classifier has another one"
        bias = np.array(weights.array(f"{name}.bias"), np.float32) if norm.has_bias else None
        return _LayerNorm(np.array(weights.array(f"{name}.weight"), np.float32), bias, norm.eps)

    def __call__(self, x: Float32) -> Float32:
        centred = x - x.mean()
        y = centred / np.sqrt(np.mean(centred * centred) + np.float32(self.eps)) * self.weight
        return np.asarray(y if self.bias is None else y + self.bias, np.float32)


@dataclass(frozen=True, slots=True)
class PooledLayers:
    """What an Encoder has behind its pooling, in order."""

    layers: tuple[_Linear | _LayerNorm, ...]

    @staticmethod
    def read(spec: ModelSpec, weights: WeightSource) -> PooledLayers:
        """The layers of a model; none where it has no classifier and no dense layers."""
        if not isinstance(spec.generation, Encoder):
            return PooledLayers(())
        dense = [_dense(weights, number, layer) for number, layer in enumerate(spec.generation.dense, 2)]
        classifier = spec.generation.classifier
        return PooledLayers((*dense, *(() if classifier is None else _classifier(weights, classifier))))

    def apply(self, pooled: Float32) -> Float32:
        """Pooled vectors (n, width) become vectors or scores, (n, what the last layer gives)."""
        if not self.layers:
            return pooled
        rows = [self._row(row) for row in (*pooled, np.zeros(pooled.shape[1], np.float32))]
        return np.stack(rows)[:-1]  # the last one is there for the width alone

    def _row(self, x: Float32) -> Float32:
        for layer in self.layers:
            x = layer(x)
        return x


def _dense(weights: WeightSource, number: int, layer: DenseLayer) -> _Linear:
    return _Linear.read(weights, f"dense_{number}", bias=layer.bias, activation=layer.activation)


def _classifier(weights: WeightSource, classifier: Classifier) -> list[_Linear | _LayerNorm]:
    found: list[_Linear | _LayerNorm] = []
    if classifier.dense:
        found.append(_Linear.read(weights, "cls", bias=classifier.dense_bias, activation=classifier.activation))
    if classifier.norm is not None:
        found.append(_LayerNorm.read(weights, "cls.norm", classifier.norm))
    found.append(_Linear.read(weights, "cls.output", bias=classifier.output_bias, activation="identity"))
    return found


def pool_rows(
    hidden: npt.NDArray[np.float32], row_starts: npt.NDArray[np.int32], pooling: Pooling
) -> npt.NDArray[np.float32]:
    """Pool the rows of each sequence: their mean, the first (cls) or the last."""
    ranges = list(pairwise(row_starts))
    if pooling == "mean":
        vectors = [hidden[begin:end].mean(axis=0, dtype=np.float64) for begin, end in ranges]
    elif pooling == "cls":
        vectors = [hidden[begin] for begin, _ in ranges]
    else:
        vectors = [hidden[end - 1] for _, end in ranges]
    return np.stack(vectors).astype(np.float32)
