"""Text to the terms of the BM25 index: the same for documents and queries, but for stop words. Knows no index.

NFKC and case folding first; words are runs of letters and digits, camelCase counts as its parts; a script without
spaces gives overlapping pairs of characters; other words are stemmed in the collection's language. Stop words are
indexed, and left out of queries: so what is a stop word may change without a new index.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from kvarn.retrieval.extras import require

MAX_KNOWN_CHARS = 1_000  # of queries whose terms are remembered
MAX_TERM_CHARS = 64  # longer runs are data, not words
DEFAULT_LANGUAGE = "english"  # of code too, whose words are English mostly
LANGUAGES = (
    *("danish", "dutch", "english", "finnish", "french", "german", "hungarian"),
    *("italian", "norwegian", "portuguese", "russian", "spanish", "swedish"),
)
BM25_K1 = 1.2
MAX_PHRASES = 8  # of a query
MAX_PHRASE_TERMS = 32  # of one that is longer, the first
MIN_STOP_WORD_SHARE = 0.15  # of a text's words; prose has 0.3 to 0.5, code and tables less
# Combining accents and vowel signs continue a word; the re module does not count them as letters.
_MARKS = "".join(chr(code) for code in range(0x300, 0xFE30) if unicodedata.category(chr(code)).startswith("M"))
_WORD = re.compile(rf"[^\W_][{_MARKS}]*(?:[^\W_][{_MARKS}]*)*")
# Each match ends at the next quotation mark, so that a text is read once.
_QUOTED = re.compile(r'"([^"]*)"|[“„”]([^“„”]*)[“”]|«([^«»]*)»|「([^「」]*)」')
_CASE_CHANGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")


def terms(text: str, language: str = DEFAULT_LANGUAGE) -> list[str]:
    """The terms of a text, in order, with repetitions."""
    return [term for word in _WORD.findall(text) for term in _word_terms(word, language)]


def query_terms(query: str, language: str = DEFAULT_LANGUAGE) -> list[str]:
    """The terms of a query without stop words, unless it has no others."""
    return list((_known_query if len(query) <= MAX_KNOWN_CHARS else _query_terms)(query, language))


def _query_terms(query: str, language: str) -> tuple[str, ...]:
    return tuple(content_terms(query, language) or terms(query, language))


@lru_cache(maxsize=64)
def _known_query(query: str, language: str) -> tuple[str, ...]:
    """A search asks for them several times."""
    return _query_terms(query, language)


def content_terms(text: str, language: str = DEFAULT_LANGUAGE) -> list[str]:
    """The terms of the words that are no stop words, in order, with repetitions."""
    words = [word for word in _WORD.findall(text) if not is_stop_word(word.casefold(), language)]
    return [term for word in words for term in _word_terms(word, language)]


def quoted_phrases(query: str, language: str = DEFAULT_LANGUAGE) -> list[tuple[str, ...]]:
    """The terms of what stands in double quotation marks, stop words too; each phrase once."""
    quoted = (next(filter(None, match.groups()), "") for match in _QUOTED.finditer(query))
    phrases = (tuple(terms(text, language)[:MAX_PHRASE_TERMS]) for text in quoted)
    return list(itertools.islice(dict.fromkeys(filter(None, phrases)), MAX_PHRASES))


def words(text: str) -> list[str]:
    """The case-folded words of a text, stop words too, whole and not stemmed, in order, with repetitions."""
    return [unicodedata.normalize("NFKC", word).casefold() for word in _WORD.findall(text)]


def rarity(document_frequency: int, num_chunks: int) -> float:
    """BM25's weight of a term that is in so many chunks: its inverse document frequency."""
    return math.log1p((num_chunks - document_frequency + 0.5) / (document_frequency + 0.5))


def bm25_limit(terms: Iterable[tuple[int, int]], num_chunks: int) -> float:
    """The BM25 score that no chunk exceeds, of a query's terms: in how many chunks each is, and its count."""
    return (BM25_K1 + 1) * sum(count * rarity(df, num_chunks) for df, count in terms)


def located_terms(text: str, language: str = DEFAULT_LANGUAGE) -> list[tuple[int, int, str]]:
    """Start, end and term of every word of a text, for highlights."""
    found = []
    for word in _WORD.finditer(text):
        for start, end in _subwords(text, word.start(), word.end()):
            found += [(start, end, term) for term in _terms_of(text[start:end], language)]
    return found


def detect_language(texts: Iterable[str]) -> str:
    """The language whose stop words are most frequent in some texts; English where they are rare in all."""
    counts = Counter(word.casefold() for text in texts for word in _WORD.findall(text))
    shares = {
        language: sum(count for word, count in counts.items() if is_stop_word(word, language)) for language in LANGUAGES
    }
    best = max(shares, key=lambda language: (shares[language], language == DEFAULT_LANGUAGE))
    return best if shares[best] >= MIN_STOP_WORD_SHARE * max(counts.total(), 1) else DEFAULT_LANGUAGE


def is_stop_word(word: str, language: str) -> bool:
    """Whether a case-folded word says nothing by itself."""
    return len(word) <= MAX_TERM_CHARS and _is_stop_word(word, language)


@lru_cache(maxsize=65_536)
def _is_stop_word(word: str, language: str) -> bool:
    return not _filter("stopword", language).analyze(word)


def _word_terms(word: str, language: str) -> tuple[str, ...]:
    """Long runs are seldom seen again, and clients decide how long: they are not kept."""
    return (_known_terms if len(word) <= MAX_TERM_CHARS else _split_terms)(word, language)


@lru_cache(maxsize=65_536)
def _known_terms(word: str, language: str) -> tuple[str, ...]:
    return _split_terms(word, language)


def _split_terms(word: str, language: str) -> tuple[str, ...]:
    parts = _subwords(word, 0, len(word))
    return tuple(term for start, end in parts for term in _terms_of(word[start:end], language))


def _subwords(text: str, start: int, end: int) -> list[tuple[int, int]]:
    if end - start == 1 or text[start + 1 : end].islower():
        return [(start, end)]
    cuts = [start, *(start + change.start() for change in _CASE_CHANGE.finditer(text[start:end])), end]
    return [(left, right) for left, right in itertools.pairwise(cuts) if right > left]


def _terms_of(word: str, language: str) -> list[str]:
    folded = word if word.isascii() else unicodedata.normalize("NFKC", word)
    folded = folded.casefold()
    is_spaced = folded.isascii() or not _UNSPACED.search(folded)
    if not is_spaced:
        return [pair for run in _WORD.findall(folded) for pair in _pairs(run)]
    if len(folded) > MAX_TERM_CHARS:
        return []
    # English stems only what is ASCII, as it did before there were other languages: existing indexes stay valid.
    return [_stem(folded, language)] if folded.isascii() or language != DEFAULT_LANGUAGE else [folded]


def _pairs(run: str) -> list[str]:
    return [run] if len(run) < 3 else [run[i : i + 2] for i in range(len(run) - 1)]


@lru_cache(maxsize=65_536)
def _stem(word: str, language: str) -> str:
    (stem,) = _filter("stemmer", language).analyze(word) or (word,)
    return str(stem)


@lru_cache(maxsize=64)
def _filter(kind: str, language: str) -> Any:
    tantivy = require("tantivy")
    chosen = getattr(tantivy.Filter, kind)(language)
    return tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.raw()).filter(chosen).build()
