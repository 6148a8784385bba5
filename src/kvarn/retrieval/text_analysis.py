"""Text to the terms of the BM25 index: the same for documents and queries. Knows no index.

NFKC and case folding first; words are runs of letters and digits, camelCase counts as its parts; a script without
spaces gives overlapping pairs of characters; English words are stemmed.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from functools import lru_cache
from typing import Any

from kvarn.retrieval.extras import require

MAX_TERM_CHARS = 64  # longer runs are data, not words
# Combining accents and vowel signs continue a word; the re module does not count them as letters.
_MARKS = "".join(chr(code) for code in range(0x300, 0xFE30) if unicodedata.category(chr(code)).startswith("M"))
_WORD = re.compile(rf"[^\W_][{_MARKS}]*(?:[^\W_][{_MARKS}]*)*")
_CASE_CHANGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")


def terms(text: str) -> list[str]:
    """The terms of a text, in order, with repetitions."""
    return [stem for _, _, stem in located_terms(text)]


def located_terms(text: str) -> list[tuple[int, int, str]]:
    """Start, end and term of every word of a text, for highlights."""
    found = []
    for word in _WORD.finditer(text):
        for start, end in _subwords(text, word.start(), word.end()):
            found += [(start, end, term) for term in _terms_of(text[start:end])]
    return found


def _subwords(text: str, start: int, end: int) -> list[tuple[int, int]]:
    if end - start == 1 or text[start + 1 : end].islower():
        return [(start, end)]
    cuts = [start, *(start + change.start() for change in _CASE_CHANGE.finditer(text[start:end])), end]
    return [(left, right) for left, right in itertools.pairwise(cuts) if right > left]


def _terms_of(word: str) -> list[str]:
    folded = word if word.isascii() else unicodedata.normalize("NFKC", word)
    folded = folded.casefold()
    if folded.isascii():
        return [_stem(folded)] if len(folded) <= MAX_TERM_CHARS else []
    if not _UNSPACED.search(folded):
        return [folded] if len(folded) <= MAX_TERM_CHARS else []
    return [pair for run in _WORD.findall(folded) for pair in _pairs(run)]


def _pairs(run: str) -> list[str]:
    return [run] if len(run) < 3 else [run[i : i + 2] for i in range(len(run) - 1)]


@lru_cache(maxsize=65_536)
def _stem(word: str) -> str:
    (stem,) = _stemmer().analyze(word) or (word,)
    return str(stem)


@lru_cache(maxsize=1)
def _stemmer() -> Any:
    tantivy = require("tantivy")
    return tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.raw()).filter(tantivy.Filter.stemmer("english")).build()
