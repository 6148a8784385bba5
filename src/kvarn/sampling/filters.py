"""Filters over candidates: each says how many, or which, are kept.

Candidates are sorted, the most probable first; weights are float64 and not normalised: exp(logit - largest logit).
Sums run left to right (cumsum, not NumPy's pairwise sum), so that the native core adds in the same order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


def keep_top_k(sorted_ids: Indices, k: int) -> Indices:
    """Keep the first k; 0 keeps all."""
    return np.arange(min(k, len(sorted_ids)) if k > 0 else len(sorted_ids))


def keep_typical(weights: Float64, logs: Float64, mass: float) -> Indices:
    """Keep those whose information is nearest to the entropy, until they hold the mass (arXiv:2202.00666).

    logs are the logarithms of the weights: logit - largest logit.
    """
    if mass >= 1.0:
        return np.arange(len(weights))
    total = np.cumsum(weights)[-1]
    information = np.log(total) - logs  # -log p
    finite = np.where(weights > 0, logs, 0.0)  # a weight of 0 adds nothing, even where its logarithm is -inf
    entropy = np.log(total) - np.cumsum(weights * finite)[-1] / total
    order = np.argsort(np.abs(information - entropy), kind="stable")
    count = _shortest_prefix(weights[order], mass)
    return np.sort(order[:count])


def keep_top_p(weights: Float64, mass: float) -> Indices:
    """Keep the shortest prefix that holds the mass (nucleus, arXiv:1904.09751); always at least one."""
    return np.arange(len(weights) if mass >= 1.0 else _shortest_prefix(weights, mass))


def keep_min_p(weights: Float64, share: float) -> Indices:
    """Keep those at least a share as probable as the first (arXiv:2407.01082)."""
    return np.flatnonzero(weights >= share * weights[0])


def drop_top_choices(weights: Float64, threshold: float) -> Indices:
    """Drop all that are at least this probable but the last of them (XTC, "exclude top choices").

    Probable among what is left of the candidates: weight >= threshold * sum of the weights. A single one stays.
    """
    num_above = int(np.count_nonzero(weights >= threshold * np.cumsum(weights)[-1]))
    return np.arange(max(num_above - 1, 0), len(weights))


def _shortest_prefix(weights: Float64, mass: float) -> int:
    cumulative = np.cumsum(weights)
    first = int(np.searchsorted(cumulative, mass * cumulative[-1], side="left"))
    return min(first + 1, len(weights))
