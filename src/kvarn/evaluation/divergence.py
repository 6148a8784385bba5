"""The arithmetic of an evaluation, token by token: losses, Kullback-Leibler divergence, agreement on the best token.

Takes logits, knows no model. KL(p || q) = sum p (a - b) - (lse a - lse b) for logits a of the source, b of the model:
the difference of two near logits is exact, so that small divergences keep their digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenDivergence:
    """One number per token. agrees: both models think the same token the most probable."""

    kl: Float64
    agrees: npt.NDArray[np.bool_]


def token_losses(logits: Float32, targets: npt.NDArray[np.int32]) -> Float64:
    """Minus the log-probability of each target, in nats."""
    picked = np.take_along_axis(logits, targets[:, None].astype(np.int64), axis=1)[:, 0]
    return _log_sums(logits)[0] - picked


def token_divergence(source: Float32, logits: Float32) -> TokenDivergence:
    """How far a model's distributions are from the source's."""
    source_lse, weights = _log_sums(source)
    lse, _ = _log_sums(logits)
    total = weights.sum(axis=1, dtype=np.float64)
    weights *= source - logits
    kl = weights.sum(axis=1, dtype=np.float64) / total - (source_lse - lse)
    return TokenDivergence(np.maximum(kl, 0.0), source.argmax(axis=1) == logits.argmax(axis=1))


def _log_sums(logits: Float32) -> tuple[Float64, Float32]:
    """log(sum(exp(logits))) of each row, and exp(logits - largest)."""
    largest = logits.max(axis=1, keepdims=True)
    weights: npt.NDArray[Any] = logits - largest
    np.exp(weights, out=weights)
    return np.log(weights.sum(axis=1, dtype=np.float64)) + largest[:, 0], weights
