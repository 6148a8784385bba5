"""How good rankings are: nDCG@10, recall@10, and whether two systems differ (paired bootstrap). Knows no index."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

K = 10
NUM_RESAMPLES = 10_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one system made of each question of a set, in the questions' order."""

    ndcg: Floats
    recall: Floats

    @staticmethod
    def of(rankings: Sequence[Sequence[str]], answers: Sequence[Collection[str]]) -> Judgement:
        """rankings: ids of chunks' documents, best first; those of one document count once."""
        unique = [list(dict.fromkeys(ranking))[:K] for ranking in rankings]
        pairs = list(zip(unique, answers, strict=True))
        return Judgement(np.array([_ndcg(*pair) for pair in pairs]), np.array([_recall(*pair) for pair in pairs]))


def interval(first: Floats, second: Floats, seed: int = 0) -> tuple[float, float, float]:
    """Mean difference of two systems on the same questions, and the bounds of its 95% bootstrap interval."""
    differences = first - second
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(differences), (NUM_RESAMPLES, len(differences)))
    means = differences[drawn].mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(differences.mean()), float(low), float(high)


def shown(difference: tuple[float, float, float]) -> str:
    """A difference with its interval, for tables."""
    mean, low, high = difference
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"


def _ndcg(ranked: Sequence[str], answers: Collection[str]) -> float:
    gain = sum(1 / math.log2(2 + place) for place, one in enumerate(ranked) if one in answers)
    return gain / sum(1 / math.log2(2 + place) for place in range(min(K, len(answers))))


def _recall(ranked: Sequence[str], answers: Collection[str]) -> float:
    return sum(one in answers for one in ranked) / min(K, len(answers))
