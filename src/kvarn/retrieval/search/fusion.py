"""Several rankings to one: reciprocal rank or score fusion, and maximal marginal relevance for diversity. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvarn.retrieval.top_k import top_k
from kvarn.retrieval.types import Float32, Scored, Tuning


def fuse(rankings: Sequence[Sequence[Scored]], tuning: Tuning, k: int) -> list[Scored]:
    """The k best of several rankings, each best first, under the weights of the tuning."""
    totals: dict[int, float] = {}
    for ranking, weight in zip(rankings, tuning.weights, strict=True):
        scores = _reciprocal_ranks(ranking, tuning.rrf_k) if tuning.fusion == "rrf" else _normalised(ranking)
        for (key, _), score in zip(ranking, scores, strict=True):
            totals[key] = totals.get(key, 0.0) + weight * score
    return top_k(totals.items(), k)


def marginal_relevance(scored: Sequence[Scored], vectors: Mapping[int, Float32], trade: float, k: int) -> list[Scored]:
    """Pick k one after the other: trade x relevance - (1 - trade) x similarity to what is picked already.

    Carbonell and Goldstein 1998. Relevance is the score, scaled to 0..1 over the candidates.
    """
    relevance = dict(zip([key for key, _ in scored], _normalised(scored), strict=True))
    left = [key for key, _ in scored if key in vectors]
    scores = dict(scored)
    similarity = dict.fromkeys(left, 0.0)
    picked: list[Scored] = []
    while left and len(picked) < k:
        best = max(left, key=lambda key: (trade * relevance[key] - (1 - trade) * similarity[key], -key))
        left.remove(best)
        picked.append((best, scores[best]))
        for key in left:
            similarity[key] = max(similarity[key], float(np.dot(vectors[key], vectors[best])))
    return picked


def _reciprocal_ranks(ranking: Sequence[Scored], rrf_k: float) -> list[float]:
    return [1.0 / (rrf_k + rank) for rank in range(1, len(ranking) + 1)]


def _normalised(ranking: Sequence[Scored]) -> list[float]:
    """Scores scaled so that the best is 1 and the worst 0; if all are equal, all are 1."""
    if not ranking:
        return []
    low, high = min(score for _, score in ranking), max(score for _, score in ranking)
    return [(score - low) / (high - low) if high > low else 1.0 for _, score in ranking]
