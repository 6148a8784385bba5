"""One search: dense and sparse candidates, fused, diversified, turned into hits. Knows a Retriever; knows no models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarn.retrieval.filters import Condition
from kvarn.retrieval.retriever import Retriever
from kvarn.retrieval.search.fusion import fuse, marginal_relevance
from kvarn.retrieval.text_analysis import located_terms, terms
from kvarn.retrieval.types import MAX_K, Float32, Hit, Mode, Scored, StoredChunk, Tuning

MIN_CANDIDATES = 50
CANDIDATES_PER_HIT = 5


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Everything about a search except its query; checked before."""

    k: int
    mode: Mode
    where: Condition | None = None
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def num_candidates(self) -> int:
        """Candidates that each kind of search gives before fusion."""
        return max(self.k, self.tuning.candidates or max(CANDIDATES_PER_HIT * self.k, MIN_CANDIDATES))


def num_reranked(k: int, tuning: Tuning | None) -> int:
    """How many hits a reranking model reads to find the k best."""
    return (tuning or Tuning()).candidates or min(CANDIDATES_PER_HIT * k, MAX_K)


def find(index: Retriever, query: str, vector: Float32 | None, options: SearchOptions) -> list[Hit]:
    """The k best chunks, best first. vector: of the query; None in sparse mode."""
    mmr = options.tuning.mmr
    scored = _scored(index, query, vector, options)
    if mmr is not None:
        vectors = index.store.vectors([key for key, _ in scored])
        scored = marginal_relevance(scored, vectors, mmr, options.k)
    chunks = index.store.chunks([key for key, _ in scored])
    marked = query if options.tuning.highlights else None
    return [_hit(chunks[key], score, marked) for key, score in scored if key in chunks]


def highlights(text: str, query: str) -> tuple[tuple[int, int], ...]:
    """Spans of the query's terms in a text; adjacent ones are joined."""
    query_terms = set(terms(query))
    spans: list[tuple[int, int]] = []
    for start, end, term in located_terms(text):
        if term not in query_terms:
            continue
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return tuple(spans)


def _scored(index: Retriever, query: str, vector: Float32 | None, options: SearchOptions) -> Sequence[Scored]:
    """The k best chunks with their scores; all candidates if they are to be diversified."""
    num_candidates, where = options.num_candidates, options.where
    k = options.k if options.tuning.mmr is None else num_candidates
    if options.mode == "sparse":
        return index.sparse(query, k, where)
    assert vector is not None
    if options.mode == "dense":
        return index.dense(vector, k, where)
    rankings = (index.dense(vector, num_candidates, where), index.sparse(query, num_candidates, where))
    return fuse(rankings, options.tuning, k)


def _hit(stored: StoredChunk, score: float, marked: str | None) -> Hit:
    """marked: the query whose terms are highlighted, if any are."""
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
        highlights=() if marked is None else highlights(chunk.text, marked),
    )
