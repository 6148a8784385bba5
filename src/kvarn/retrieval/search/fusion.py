"""From scored candidates to the best few: rank and score fusion, bounded top-k, maximal marginal relevance. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvarn.retrieval.types import Float32, Scored, Tuning


def fuse(legs: Sequence[Sequence[Scored]], tuning: Tuning, k: int) -> list[Scored]:
    """The k best of several ranked lists, each best first, under the weights of the tuning."""
    totals: dict[int, float] = {}
    for leg, weight in zip(legs, tuning.weights, strict=True):
        shares = _ranks(leg, tuning.rrf_k) if tuning.fusion == "rrf" else _normalised(leg)
        for (key, _), share in zip(leg, shares, strict=True):
            totals[key] = totals.get(key, 0.0) + weight * share
    return top_k(totals.items(), k)


def top_k(scored: Iterable[Scored], k: int) -> list[Scored]:
    """The k highest scores, best first, of equal ones the lower key; memory for k of them at any time."""
    heap: list[tuple[float, int]] = []  # the worst kept one on top
    for key, score in scored:
        entry = (score, -key)
        if len(heap) < k:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)
    return [(-negative, score) for score, negative in sorted(heap, reverse=True)]


def marginal_relevance(scored: Sequence[Scored], vectors: Mapping[int, Float32], trade: float, k: int) -> list[Scored]:
    """Pick k one after the other: trade x relevance - (1 - trade) x similarity to what is picked already.

    Carbonell and Goldstein 1998. Relevance is the score, scaled to 0..1 over the candidates.
    """
    relevance = dict(zip([key for key, _ in scored], _normalised(scored), strict=True))
    left = [key for key, _ in scored if key in vectors]
    scores = dict(scored)
    likeness = dict.fromkeys(left, 0.0)
    picked: list[Scored] = []
    while left and len(picked) < k:
        best = max(left, key=lambda key: (trade * relevance[key] - (1 - trade) * likeness[key], -key))
        left.remove(best)
        picked.append((best, scores[best]))
        for key in left:
            likeness[key] = max(likeness[key], float(np.dot(vectors[key], vectors[best])))
    return picked


def _ranks(leg: Sequence[Scored], rrf_k: float) -> list[float]:
    return [1.0 / (rrf_k + rank) for rank in range(1, len(leg) + 1)]


def _normalised(leg: Sequence[Scored]) -> list[float]:
    """Scores scaled so that the best is 1 and the worst of the list 0; all equal ones are 1."""
    if not leg:
        return []
    low, high = min(score for _, score in leg), max(score for _, score in leg)
    return [(score - low) / (high - low) if high > low else 1.0 for _, score in leg]
