"""Fusion, top-k and marginal relevance against the obvious way of computing them."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.errors import InvalidParameter
from kvarn.retrieval.search.fusion import fuse, marginal_relevance
from kvarn.retrieval.top_k import top_k
from kvarn.retrieval.types import Fusion, Scored, Tuning
from tests.conftest import Size
from tests.unit.retrieval.words import unit


@pytest.mark.parametrize("fusion", ["rrf", "weighted"])
def test_fusion_equals_brute_force(fusion: Fusion, size: Size) -> None:
    rng = np.random.default_rng(0)
    for _ in range(size(1_000, 5_000)):
        legs = [_leg(rng), _leg(rng)]
        tuning = Tuning(fusion, (float(rng.random()) + 0.01, float(rng.random())), float(rng.integers(0, 100)))
        k = int(rng.integers(1, 12))
        assert fuse(legs, tuning, k) == _brute_force(legs, tuning)[:k]


def test_the_default_fusion_equals_brute_force(size: Size) -> None:
    rng = np.random.default_rng(1)
    for _ in range(size(1_000, 10_000)):
        legs = [_leg(rng), _leg(rng)]
        k = int(rng.integers(1, 45))
        assert fuse(legs, Tuning(), k) == _brute_force(legs, Tuning("weighted", (0.75, 0.25)))[:k]


def test_the_default_follows_meaning_unless_words_speak_clearly() -> None:
    dense = [(1, 0.60), (2, 0.58), (3, 0.20)]
    assert fuse([dense, [(2, 9.0), (3, 8.9), (1, 1.0)]], Tuning(), 1)[0][0] == 2  # nearly as near, and its words match
    assert fuse([dense, [(3, 9.0), (2, 1.0), (1, 1.0)]], Tuning(), 1)[0][0] == 1  # words alone are not enough


def test_the_best_of_one_leg_is_the_best_when_only_it_counts() -> None:
    legs = [[(1, 0.9), (2, 0.5)], [(2, 8.0), (3, 4.0)]]
    assert fuse(legs, Tuning(weights=(1.0, 0.0)), 1)[0][0] == 1
    assert fuse(legs, Tuning(weights=(0.0, 1.0)), 1)[0][0] == 2


def test_equal_scores_are_ordered_by_key() -> None:
    assert top_k([(5, 1.0), (3, 1.0), (9, 1.0), (4, 2.0)], 3) == [(4, 2.0), (3, 1.0), (5, 1.0)]


def test_marginal_relevance_prefers_what_is_new() -> None:
    vectors = dict(enumerate(unit(np.array([[1, 0, 0], [1, 0.01, 0], [0, 1, 0]], np.float32))))
    scored = [(0, 1.0), (1, 0.99), (2, 0.5)]
    assert [key for key, _ in marginal_relevance(scored, vectors, 0.5, 2)] == [0, 2]
    assert [key for key, _ in marginal_relevance(scored, vectors, 1.0, 2)] == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"weights": (float("nan"), 1.0)},
        {"weights": (float("inf"), 1.0)},
        {"weights": (-1.0, 1.0)},
        {"weights": (0.0, 0.0)},
        {"weights": (1.0,)},
        {"rrf_k": -1.0},
        {"mmr": 1.5},
        {"mmr": float("nan")},
        {"candidates": 0},
        {"candidates": 10**9},
        {"fusion": "magic"},
    ],
)
def test_a_wrong_tuning_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter):
        Tuning(**change)  # type: ignore[arg-type]


def _leg(rng: np.random.Generator) -> list[Scored]:
    keys = rng.permutation(30)[: rng.integers(0, 20)]
    scores = np.round(rng.standard_normal(len(keys)), 1)  # rounded, so that some are equal
    return sorted(
        ((int(key), float(score)) for key, score in zip(keys, scores, strict=True)), key=lambda p: (-p[1], p[0])
    )


def _brute_force(legs: list[list[Scored]], tuning: Tuning) -> list[Scored]:
    totals: dict[int, float] = {}
    for leg, weight in zip(legs, tuning.weights, strict=True):
        scores = [score for _, score in leg]
        for rank, (key, score) in enumerate(leg, 1):
            if tuning.fusion == "rrf":
                share = 1 / (tuning.rrf_k + rank)
            else:
                spread = max(scores) - min(scores)
                share = (score - min(scores)) / spread if spread else 1.0
            totals[key] = totals.get(key, 0.0) + weight * share
    return sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))
