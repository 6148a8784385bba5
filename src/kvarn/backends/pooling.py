"""From one hidden state per token to one vector per text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvarn.formats.weights import WeightSource
from kvarn.models.spec import Pooling


@dataclass(frozen=True, slots=True)
class ClassifierWeights:
    """The weights of a models.spec.Classifier."""

    dense: npt.NDArray[np.float32]  # (width, width)
    dense_bias: npt.NDArray[np.float32]
    output: npt.NDArray[np.float32]  # (labels, width)
    output_bias: npt.NDArray[np.float32]

    @staticmethod
    def read(weights: WeightSource) -> ClassifierWeights:
        names = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias")
        return ClassifierWeights(*(np.array(weights.array(name), np.float32) for name in names))

    def scores(self, first: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Scores of each text, (n, labels), from the state of its first token, (n, width)."""
        inner = np.tanh(first @ self.dense.T + self.dense_bias)
        return np.asarray(inner @ self.output.T + self.output_bias, np.float32)


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
