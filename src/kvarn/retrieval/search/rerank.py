"""Hits in a new order, by a model that reads query and text together (kvarn.reranking)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvarn.reranking.rank import rerank
from kvarn.retrieval.types import Float32, Hit

if TYPE_CHECKING:
    from kvarn.llm import LLM


def rerank_hits(llm: LLM, query: str, hits: Sequence[Hit], k: int, tenant: str = "") -> list[Hit]:
    """The k best of the hits with their new scores; among equal scores the earlier one first."""
    return best_hits(hits, rerank(llm, query, [hit.text for hit in hits], tenant), k)


def best_hits(hits: Sequence[Hit], scores: Sequence[float] | Float32, k: int) -> list[Hit]:
    """The k hits with the highest scores, carrying these scores."""
    order = sorted(range(len(hits)), key=lambda number: (-scores[number], number))[:k]
    return [replace(hits[number], score=float(scores[number])) for number in order]
