"""One search: dense and sparse candidates, fused, diversified, turned into hits. Knows a Retriever; knows no models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvarn.retrieval.filters import Condition, parse_filter
from kvarn.retrieval.retriever import Retriever
from kvarn.retrieval.scores import Scales
from kvarn.retrieval.search.fusion import ScoreFusion, fuse_ranks, marginal_relevance
from kvarn.retrieval.search.relevance import relevances
from kvarn.retrieval.text_analysis import DEFAULT_LANGUAGE, located_terms, query_terms
from kvarn.retrieval.types import MAX_K, Float32, Hit, Mode, Scored, StoredChunk, Tuning, check, check_k, check_mode

Spans = Callable[[str], tuple[tuple[int, int], ...]]
MIN_CANDIDATES = 300  # so many that the best hits are the same for every k up to 100
CANDIDATES_PER_HIT = 3
RERANKED_PER_HIT = 5
MORE_RANKED = 4  # times as many, when too few are left of those ranked


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Everything about a search except its query; checked before."""

    k: int
    mode: Mode
    where: Condition | None = None
    tuning: Tuning = field(default_factory=Tuning)

    @classmethod
    def checked(cls, k: int, mode: Mode, filter: Mapping[str, Any] | None, tuning: Tuning | None) -> SearchOptions:
        """Options as callers give them."""
        check_k("k", k)
        check_mode(mode)
        check.instance("tuning", tuning, Tuning, "a kvarn.Tuning, or None", optional=True)
        return cls(k, mode, parse_filter(filter), tuning or Tuning())

    @property
    def num_candidates(self) -> int:
        """Candidates that each kind of search gives before fusion."""
        num_candidates = self.tuning.candidates or max(CANDIDATES_PER_HIT * self.k, MIN_CANDIDATES)
        return max(self.k, min(num_candidates, MAX_K))


def num_reranked(k: int, tuning: Tuning | None) -> int:
    """How many hits a reranking model reads to find the k best."""
    return (tuning or Tuning()).candidates or min(RERANKED_PER_HIT * k, MAX_K)


@dataclass(frozen=True, slots=True)
class _Ranking:
    """The best chunks with their scores, and cosines and BM25 of any of them."""

    best: Callable[[int], Sequence[Scored]]
    cosines_of: Callable[[Sequence[int]], Mapping[int, float]]
    bm25_of: Callable[[Sequence[int]], Mapping[int, float]]


def find(index: Retriever, query: str, vector: Float32 | None, options: SearchOptions) -> list[Hit]:
    """The k best chunks, best first. vector: of the query; None in sparse mode."""
    scales = None if vector is None else index.scales(query, vector)
    ranking = _ranking(index, query, vector, scales, options)
    chunks: dict[int, StoredChunk] = {}
    scored = _tuned(index, ranking, options, chunks)
    keys = [key for key, _ in scored]
    chunks |= index.store.chunks([key for key in keys if key not in chunks])
    known = {}
    if keys and scales is not None:
        known = relevances(index, query, scales, ranking.cosines_of(keys), ranking.bm25_of(keys))
    spans = partial(highlights, query=query, language=index.language) if options.tuning.highlights else _no_highlights
    return [_hit(chunks[key], score, known.get(key), spans) for key, score in scored if key in chunks]


def highlights(text: str, query: str, language: str = DEFAULT_LANGUAGE) -> tuple[tuple[int, int], ...]:
    """Spans of the words that were looked for in a text; adjacent ones are joined."""
    wanted = set(query_terms(query, language))
    spans: list[tuple[int, int]] = []
    for start, end, term in located_terms(text, language):
        if term not in wanted:
            continue
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return tuple(spans)


def _no_highlights(_text: str) -> tuple[tuple[int, int], ...]:
    return ()


def _ranking(
    index: Retriever, query: str, vector: Float32 | None, scales: Scales | None, options: SearchOptions
) -> _Ranking:
    num_candidates, where, tuning = options.num_candidates, options.where, options.tuning
    k = options.k if tuning.mmr is None and tuning.per_document is None else num_candidates
    if vector is None or scales is None:
        scored = index.sparse(query, k, where)
    elif options.mode == "dense":
        scored = index.dense(vector, k, where)
    elif tuning.fusion == "rrf":
        rankings = (index.dense(vector, num_candidates, where), index.sparse(query, num_candidates, where))
        scored = fuse_ranks(rankings, tuning, k)
    else:
        candidates = index.candidates(query, vector, num_candidates, where)
        fusion = ScoreFusion(candidates, scales, tuning, partial(index.cosines, vector), partial(index.bm25, query))
        return _Ranking(fusion.best, fusion.cosines_of, fusion.bm25_of)

    def cosines(keys: Sequence[int]) -> Mapping[int, float]:
        return {} if vector is None else index.cosines(vector, np.array(keys, np.int64)).by_key()

    return _Ranking(lambda k: scored[:k], cosines, lambda keys: index.bm25(query, np.array(keys, np.int64)).by_key())


def _tuned(
    index: Retriever, ranking: _Ranking, options: SearchOptions, chunks: dict[int, StoredChunk]
) -> Sequence[Scored]:
    """The k best that the tuning lets through; more and more are ranked until there are k. chunks: gains those read."""
    tuning, num_ranked = options.tuning, options.k if options.tuning.mmr is None else options.num_candidates
    while True:
        ranked = ranking.best(num_ranked)
        bar = tuning.min_score
        scored = ranked if bar is None else [one for one in ranked if one[1] >= bar]
        if tuning.per_document is not None:
            chunks |= index.store.chunks([key for key, _ in scored if key not in chunks])
            scored = _best_of_each(scored, tuning.per_document, chunks)
        if len(scored) >= options.k or num_ranked >= options.num_candidates or len(ranked) < num_ranked:
            break
        num_ranked = min(MORE_RANKED * num_ranked, options.num_candidates)
    if tuning.mmr is not None:
        vectors = index.store.vectors([key for key, _ in scored])
        return marginal_relevance(scored, vectors, tuning.mmr, options.k)
    return scored[: options.k]


def _best_of_each(scored: Sequence[Scored], count: int, chunks: Mapping[int, StoredChunk]) -> Sequence[Scored]:
    """The best chunks of every document, at most so many of each."""
    kept: Counter[str] = Counter()
    best = []
    for key, score in scored:
        if key in chunks and kept[chunks[key].document] < count:
            kept[chunks[key].document] += 1
            best.append((key, score))
    return best


def _hit(stored: StoredChunk, score: float, relevance: float | None, spans: Spans) -> Hit:
    """spans: the highlights of a text."""
    chunk = stored.chunk
    return Hit(
        id=stored.id,
        text=chunk.text,
        score=score,
        source=stored.source,
        span=(chunk.start, chunk.end),
        document=stored.document,
        heading=chunk.heading,
        metadata=stored.metadata,
        relevance=relevance,
        highlights=spans(chunk.text),
        lines=chunk.lines,
        page=chunk.page,
        ordinal=stored.ordinal,
    )
