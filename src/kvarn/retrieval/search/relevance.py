"""How likely a hit answers its query: a share of 0 to 1 that means the same in every collection, beside the rank.

Knows a Retriever; knows no order of hits, which stays that of their scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvarn.retrieval.retriever import Retriever
from kvarn.retrieval.scores import Scales
from kvarn.retrieval.text_analysis import query_terms, rarity


@dataclass(frozen=True, slots=True)
class RelevanceModel:
    """A logistic function, fitted on questions with and without an answer in a collection (ADR 40)."""

    constant: float = -7.9
    meaning: float = 20.0  # times how far the chunk's cosine is from the query's mean cosine to 1
    words: float = 10.0  # times its BM25, as a share of what the query could have
    unknown: float = -6.0  # times the share of the query's words, by rarity, that are nowhere in the collection

    def relevance(self, by_meaning: float, by_words: float, unknown: float) -> float:
        logit = self.constant + self.meaning * by_meaning + self.words * by_words + self.unknown * unknown
        return 1.0 / (1.0 + math.exp(-logit))


MODEL = RelevanceModel()
UNRELATED_CHUNKS = 16  # of cosine 0, thought to be in every collection: a small one knows few words, and is its hits


def relevances(
    index: Retriever, query: str, scales: Scales, cosines: Mapping[int, float], bm25: Mapping[int, float]
) -> dict[int, float]:
    """The relevance of chunks of these cosines and BM25 for a query, whose scales these are."""
    known = index.num_chunks / (index.num_chunks + UNRELATED_CHUNKS)
    scales, unknown = replace(scales, mean=scales.mean * known), unknown_share(index, query) * known
    return {
        key: MODEL.relevance(*scales.shares(cosine, bm25.get(key, 0.0)), unknown) for key, cosine in cosines.items()
    }


def unknown_share(index: Retriever, query: str) -> float:
    """Which part of a query's words is in no chunk, by rarity: what nobody wrote of cannot be answered."""
    words = sorted(set(query_terms(query, index.language)))
    frequencies, num_chunks = index.document_frequencies(words), index.num_chunks
    weights = {word: rarity(frequency, num_chunks) for word, frequency in frequencies.items()}
    total = sum(weights.values())
    return sum(weight for word, weight in weights.items() if not frequencies[word]) / total if total else 0.0
