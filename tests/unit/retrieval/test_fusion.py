"""Fusion, top-k and marginal relevance against the obvious way of computing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from kvarn.errors import InvalidParameter
from kvarn.retrieval.scores import ChunkCandidates, Keys, Scales, Scores
from kvarn.retrieval.search.fusion import ScoreFusion, fuse_ranks, marginal_relevance
from kvarn.retrieval.top_k import top_k
from kvarn.retrieval.types import Scored, Tuning
from tests.conftest import Size
from tests.unit.retrieval.words import unit


def test_reciprocal_ranks_equal_brute_force(size: Size) -> None:
    rng = np.random.default_rng(0)
    for _ in range(size(1_000, 5_000)):
        legs = [_leg(rng), _leg(rng)]
        tuning = Tuning("rrf", (float(rng.random()) + 0.01, float(rng.random())), float(rng.integers(0, 100)))
        k = int(rng.integers(1, 12))
        assert fuse_ranks(legs, tuning, k) == _brute_force(legs, tuning)[:k]


def test_fused_scores_equal_brute_force_for_every_k(size: Size) -> None:
    rng = np.random.default_rng(1)
    for _ in range(size(300, 3_000)):
        num, depth = int(rng.integers(1, 80)), int(rng.integers(1, 40))
        made = _Made.of(rng, num, depth)
        weights = (1.0, 0.0) if rng.random() < 0.1 else (0.6, 0.4)
        expected = made.brute_force(weights)
        fusion = made.fusion(Tuning(weights=weights))
        for k in (1, 5, 30, 100):
            got = fusion.best(k) if rng.random() < 0.5 else made.fusion(Tuning(weights=weights)).best(k)
            assert got == expected[:k]
            assert fusion.bm25_of([key for key, _ in fusion.best(k)]) == {key: made.bm25[key] for key, _ in got}


def test_scores_are_looked_up_only_where_they_could_matter() -> None:
    cosines, bm25 = _scores({1: 0.9, 2: 0.5, 3: 0.1}), _scores({2: 5.0})
    asked: list[int] = []

    def look_up(keys: Keys) -> Scores:
        asked.extend(keys.tolist())
        return _scores({})

    ScoreFusion(ChunkCandidates(cosines, bm25, 0.1, 1.0), Scales(0.1, 10.0), Tuning(), look_up, look_up).best(1)
    assert asked == [1]
    asked.clear()
    cosines, bm25 = _scores({1: 0.9, 2: 0.8}), _scores({3: 9.0, 1: 5.0, 2: 4.0, 4: 3.0})
    ScoreFusion(ChunkCandidates(cosines, bm25, 0.8, 3.0), Scales(0.1, 10.0), Tuning(), look_up, look_up).best(1)
    assert asked == [3]


def test_a_chunk_that_the_graph_has_missed_keeps_its_own_cosine() -> None:
    candidates = ChunkCandidates(_scores({1: 0.9, 2: 0.5}), _scores({3: 9.0}), 0.5, 0.0)
    fusion = ScoreFusion(candidates, Scales(0.1, 10.0), Tuning(), lambda _: _scores({3: 0.8}), lambda _: _scores({}))
    (best, score), *_ = fusion.best(3)
    assert (best, score) == (3, pytest.approx(0.6 * (0.5 - 0.1) / 0.9 + 0.4 * 0.9))
    assert fusion.cosines_of([1, 3]) == {1: 0.9, 3: 0.8}


def test_a_chunk_that_is_gone_is_no_hit() -> None:
    candidates = ChunkCandidates(_scores({1: 0.5}), _scores({1: 1.0, 7: 9.0}), 0.5, 0.0)
    fusion = ScoreFusion(candidates, Scales(0.1, 10.0), Tuning(), lambda _: _scores({}), lambda _: _scores({}))
    assert [key for key, _ in fusion.best(5)] == [1]


def test_the_default_follows_meaning_unless_words_speak_clearly() -> None:
    assert _best({1: (0.60, 0.5), 2: (0.58, 5.0)}) == 2  # nearly as near, and its words match
    assert _best({1: (0.60, 0.5), 3: (0.1, 5.0)}) == 1  # words alone are not enough


def test_the_best_of_one_leg_is_the_best_when_only_it_counts() -> None:
    both = {1: (0.9, 0.0), 2: (0.5, 8.0), 3: (0.1, 4.0)}
    assert _best(both, Tuning(weights=(1.0, 0.0))) == 1
    assert _best(both, Tuning(weights=(0.0, 1.0))) == 2


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
        for rank, (key, _) in enumerate(leg, 1):
            totals[key] = totals.get(key, 0.0) + weight / (tuning.rrf_k + rank)
    return sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))


def _best(scores: dict[int, tuple[float, float]], tuning: Tuning | None = None) -> int:
    cosines, bm25 = ({key: pair[n] for key, pair in scores.items()} for n in (0, 1))
    candidates = ChunkCandidates(_scores(cosines), _scores(bm25), 0.0, 0.0)
    fusion = ScoreFusion(
        candidates, Scales(0.1, 15.0), tuning or Tuning(), lambda _: _scores({}), lambda _: _scores({})
    )
    return fusion.best(1)[0][0]


def _scores(values: Mapping[int, float]) -> Scores:
    return Scores.of(sorted(values.items(), key=lambda pair: (-pair[1], pair[0])))


@dataclass(frozen=True)
class _Made:
    """A collection whose scores for a query are known, and how many chunks each kind of search finds."""

    cosines: dict[int, float]
    bm25: dict[int, float]  # 0 for those without a word of the query
    depth: int
    scales: Scales

    @staticmethod
    def of(rng: np.random.Generator, num: int, depth: int) -> _Made:
        keys = [int(key) for key in rng.permutation(1_000)[:num]]
        cosines = {key: round(float(rng.random()), 2) for key in keys}  # rounded, so that some are equal
        bm25 = {key: round(9 * float(rng.random()), 1) * (rng.random() < 0.7) for key in keys}
        return _Made(cosines, bm25, depth, Scales(0.1, 20.0))

    @property
    def candidates(self) -> ChunkCandidates:
        near, words = _scores(self.cosines), _scores({key: one for key, one in self.bm25.items() if one})
        first, found = (Scores(one.keys[: self.depth], one.values[: self.depth]) for one in (near, words))
        least = float(found.values[-1]) if len(found) >= self.depth else 0.0
        return ChunkCandidates(first, found, float(first.values[-1]), least)

    def fusion(self, tuning: Tuning) -> ScoreFusion:
        candidates = self.candidates

        def cosines(keys: Keys) -> Scores:
            assert not set(keys.tolist()) & set(candidates.cosines.keys.tolist())
            return _scores({key: self.cosines[key] for key in keys.tolist()})

        def bm25(keys: Keys) -> Scores:
            assert not set(keys.tolist()) & set(candidates.bm25.keys.tolist())
            return _scores({key: self.bm25[key] for key in keys.tolist() if self.bm25[key]})

        return ScoreFusion(candidates, self.scales, tuning, cosines, bm25)

    def brute_force(self, weights: tuple[float, float]) -> list[Scored]:
        found = self.candidates
        fused = {}
        for key in {*found.cosines.keys.tolist(), *found.bm25.keys.tolist()}:
            by_meaning, by_words = self.scales.shares(self.cosines[key], self.bm25[key])
            fused[key] = weights[0] * by_meaning + weights[1] * by_words
        return sorted(fused.items(), key=lambda pair: (-pair[1], pair[0]))
