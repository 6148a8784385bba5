"""One search: candidates of both kinds, fused, re-ordered, turned into hits. Knows a Retriever; knows no models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarn.retrieval.filters import Condition
from kvarn.retrieval.retriever import Retriever
from kvarn.retrieval.search.fusion import fuse, marginal_relevance
from kvarn.retrieval.storage.text_analysis import located_terms, terms
from kvarn.retrieval.types import MAX_K, Float32, Hit, Mode, Scored, StoredChunk, Tuning

MIN_CANDIDATES = 50
CANDIDATES = 5  # for each wanted one


@dataclass(frozen=True, slots=True)
class Query:
    """A checked question: vector is None in sparse mode."""

    text: str
    vector: Float32 | None
    k: int
    mode: Mode
    where: Condition | None = None
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def depth(self) -> int:
        """How many candidates of each kind are looked at."""
        return max(self.k, self.tuning.candidates or max(CANDIDATES * self.k, MIN_CANDIDATES))


def num_reranked(k: int, tuning: Tuning | None) -> int:
    """How many hits a reranking model reads to find the k best."""
    return (tuning or Tuning()).candidates or min(CANDIDATES * k, MAX_K)


def find(index: Retriever, query: Query) -> list[Hit]:
    """The k best chunks, best first."""
    wanted = query.k if query.tuning.mmr is None else query.depth
    scored = _scored(index, query, wanted)
    if query.tuning.mmr is not None:
        vectors = index.vectors([key for key, _ in scored])
        scored = marginal_relevance(scored, vectors, query.tuning.mmr, query.k)
    chunks = index.chunks([key for key, _ in scored])
    return [as_hit(chunks[key], score, query) for key, score in scored if key in chunks]


def as_hit(chunk: StoredChunk, score: float, query: Query) -> Hit:
    piece = chunk.piece
    return Hit(
        id=chunk.id,
        text=piece.text,
        score=score,
        source=chunk.source,
        span=(piece.start, piece.end),
        document=chunk.document,
        heading=piece.heading,
        metadata=chunk.metadata,
        highlights=highlights(piece.text, query.text) if query.tuning.highlights else (),
    )


def highlights(text: str, query: str) -> tuple[tuple[int, int], ...]:
    """Where words of the query stand in a text; touching ones are joined."""
    wanted = set(terms(query))
    spans: list[tuple[int, int]] = []
    for start, end, term in located_terms(text):
        if term not in wanted:
            continue
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return tuple(spans)


def _scored(index: Retriever, query: Query, count: int) -> Sequence[Scored]:
    if query.mode == "sparse":
        return index.sparse(query.text, count, query.where)
    assert query.vector is not None
    if query.mode == "dense":
        return index.dense(query.vector, count, query.where)
    legs = (
        index.dense(query.vector, query.depth, query.where),
        index.sparse(query.text, query.depth, query.where),
    )
    return fuse(legs, query.tuning, count)
