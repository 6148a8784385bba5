"""Phrases in quotation marks on Milvus, which stores no positions: found in the terms that chunks are stored with.

Knows terms and scores; knows no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvarn.retrieval.types import Scored

Phrase = Sequence[str]  # terms
TermsOf = Callable[[Sequence[int]], Mapping[int, str]]  # of chunks, in the order of their text, with spaces between
ByWords = Callable[[Phrase, int, None], Sequence[Scored]]  # the best chunks by BM25 of some terms
NUM_READ = 300  # chunks, the best by the words of the query, in which phrases are looked for


def with_phrases(
    found: Sequence[Scored], phrases: Sequence[Phrase], terms_of: TermsOf, by_words: ByWords
) -> list[Scored]:
    """Scores with those of each phrase's words added where these follow each other; in no order."""
    total = dict(found)
    texts = {key: f" {text} " for key, text in terms_of(list(total)).items()} if phrases and total else {}
    for phrase in phrases:
        words = f" {' '.join(phrase)} "
        having = [key for key, text in texts.items() if words in text]
        # Not asked for among these chunks alone: milvus-lite then counts words in these alone.
        scores = dict(by_words(phrase, NUM_READ, None)) if having else {}
        for key in having:
            total[key] += scores.get(key, min(scores.values(), default=0.0))
    return list(total.items())
