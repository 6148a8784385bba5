"""Parts of a ModelSpec: what an encoder has behind its pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvarn.models.spec import Norm

ClassifierActivation = Literal["identity", "tanh", "relu", "gelu"]


@dataclass(frozen=True, slots=True)
class Classifier:
    """scores = cls.output @ norm(act(cls @ x + bias)) + bias, for the pooled x: (labels).

    Without a dense layer, cls.output @ x. Tensors cls, cls.norm, cls.output.
    """

    labels: int
    activation: ClassifierActivation = "tanh"
    dense: bool = True
    dense_bias: bool = True
    norm: Norm | None = None
    output_bias: bool = True
    relevant: int = 0  # the label that says: the second text answers the first


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A pooled vector becomes act(weight @ x + bias), of `width` values. Tensors dense_2, dense_3, ... in order."""

    width: int
    activation: ClassifierActivation = "identity"
    bias: bool = False
