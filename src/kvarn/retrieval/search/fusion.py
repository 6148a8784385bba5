"""Two kinds of search to one ranking: by scores or by reciprocal ranks; and maximal marginal relevance. Pure.

Every candidate has both scores, and each score has a scale that depends on the query and the collection only. So the
order of two chunks does not depend on how many hits are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvarn.retrieval.scores import ChunkCandidates, Float64, Keys, Scales, Scores
from kvarn.retrieval.top_k import top_k
from kvarn.retrieval.types import Float32, Scored, Tuning

FIRST_BLOCK = 48  # chunks whose missing score is looked up at first; then ...
GROWTH = 4  # times as many, and so on
NOT_THERE = -np.inf
Bools = npt.NDArray[np.bool_]
LookUp = Callable[[Keys], Scores]


class ScoreFusion:
    """The best by the weighted sum of both scores, each on a scale that does not depend on the candidates.

    A score that a candidate lacks is looked up only if the chunk could be among the best should it be as near, or
    should its words match as well, as the last one that such a search has found: the result is as if all had been
    looked up. A chunk that the graph has missed counts as at most as near as the last one it found.
    """

    def __init__(
        self, candidates: ChunkCandidates, scales: Scales, tuning: Tuning, cosines: LookUp, bm25: LookUp
    ) -> None:
        """cosines, bm25: of given chunks; those that are not there any more, or that share no word, are left out."""
        near, matching = candidates.cosines, candidates.bm25
        self._keys = _union(near.keys, matching.keys)
        self._cosines: Float64 = np.full(len(self._keys), candidates.max_other_cosine)
        self._bm25: Float64 = np.full(len(self._keys), candidates.max_other_bm25)
        self._lacks_cosine = self._enter(near, self._cosines)
        self._true_cosines = self._cosines.copy()
        self._lacks_bm25 = self._enter(matching, self._bm25) & (candidates.max_other_bm25 > 0.0)
        self._is_gone = np.zeros(len(self._keys), bool)
        self._max_other_cosine = candidates.max_other_cosine
        self._scales = scales
        self._weights = [weight / sum(tuning.weights) for weight in tuning.weights]
        self._look_up_cosines, self._look_up_bm25 = cosines, bm25

    def best(self, k: int) -> list[Scored]:
        """The k best, best first; among equal ones the lower key first."""
        block = FIRST_BLOCK
        while len(places := self._undecided(k)[:block]):
            self._learn_cosines(places[self._lacks_cosine[places]])
            self._learn_bm25(places[self._lacks_bm25[places]])
            block *= GROWTH
        scores = self._fused(self._bm25)
        num_there = min(k, len(scores) - int(self._is_gone.sum()))
        likely = np.flatnonzero(scores >= np.partition(scores, -k)[-k]) if k < len(scores) else np.arange(len(scores))
        order = likely[np.argsort(-scores[likely], kind="stable")[:num_there]]
        return list(zip(self._keys[order].tolist(), scores[order].tolist(), strict=True))

    def bm25_of(self, keys: Sequence[int]) -> dict[int, float]:
        """BM25 of some of the best."""
        return dict(zip(keys, self._bm25[np.searchsorted(self._keys, keys)].tolist(), strict=True))

    def cosines_of(self, keys: Sequence[int]) -> dict[int, float]:
        """Cosines of some of the best; those that the graph has missed have their own here."""
        return dict(zip(keys, self._true_cosines[np.searchsorted(self._keys, keys)].tolist(), strict=True))

    def _undecided(self, k: int) -> Keys:
        """Where the candidates are that could be among the k best and lack a score; the likeliest first."""
        at_most = self._fused(self._bm25)
        at_least = self._fused(np.where(self._lacks_bm25, 0.0, self._bm25))
        at_least[self._lacks_cosine] = NOT_THERE
        bar = np.partition(at_least, -k)[-k] if k < len(at_least) else NOT_THERE
        found = np.flatnonzero((self._lacks_cosine | self._lacks_bm25) & (at_most >= bar))
        return found[np.argsort(-at_most[found], kind="stable")]

    def _learn_cosines(self, places: Keys) -> None:
        """Those that are not there any more can be no hits."""
        if len(places):
            found = self._look_up_cosines(self._keys[places])
            limited = Scores(found.keys, np.minimum(found.values, self._max_other_cosine))
            self._enter(found, self._true_cosines)
            self._is_gone[places] = self._enter(limited, self._cosines)[places]
            self._lacks_cosine[places] = False

    def _learn_bm25(self, places: Keys) -> None:
        """Those that share no word with the query have 0."""
        if len(places):
            self._bm25[places] = 0.0
            self._enter(self._look_up_bm25(self._keys[places]), self._bm25)
            self._lacks_bm25[places] = False

    def _fused(self, bm25: Float64) -> Float64:
        by_meaning, by_words = self._scales.shares(self._cosines, bm25)
        dense, sparse = self._weights
        fused: Float64 = np.where(self._is_gone, NOT_THERE, dense * by_meaning + sparse * by_words)
        return fused

    def _enter(self, scores: Scores, values: Float64) -> Bools:
        """Write scores to their places; returns which places were not among them."""
        is_missing = np.ones(len(self._keys), bool)
        places = np.searchsorted(self._keys, scores.keys)
        values[places], is_missing[places] = scores.values, False
        return is_missing


def _union(first: Keys, second: Keys) -> Keys:
    """The keys of both, each once, in order: for a few hundred three times as fast as np.union1d."""
    keys = np.sort(np.concatenate([first, second]))
    return keys[np.diff(keys, prepend=keys[:1] - 1) > 0]


def fuse_ranks(rankings: Sequence[Sequence[Scored]], tuning: Tuning, k: int) -> list[Scored]:
    """The k best of several rankings, each best first, by their reciprocal ranks under the weights of the tuning."""
    totals: dict[int, float] = {}
    for ranking, weight in zip(rankings, tuning.weights, strict=True):
        for rank, (key, _) in enumerate(ranking, 1):
            totals[key] = totals.get(key, 0.0) + weight / (tuning.rrf_k + rank)
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


def _normalised(ranking: Sequence[Scored]) -> list[float]:
    """Scores scaled so that the best is 1 and the worst 0; if all are equal, all are 1."""
    if not ranking:
        return []
    low, high = min(score for _, score in ranking), max(score for _, score in ranking)
    return [(score - low) / (high - low) if high > low else 1.0 for _, score in ranking]
