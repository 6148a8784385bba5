"""The sparse index of one collection: BM25 over the terms of text_analysis.py (tantivy). Knows keys and texts.

k1 is 1.2 and b 0.75; a chunk's length is rounded to one byte. Its statistics count removed chunks until tantivy merges
them away or the index is rebuilt: num_removed. A phrase in quotation marks counts as another term.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvarn.errors import StorageError
from kvarn.retrieval.extras import require
from kvarn.retrieval.scores import Keys, Scores
from kvarn.retrieval.text_analysis import DEFAULT_LANGUAGE, bm25_limit, query_terms, quoted_phrases, terms

RECORD = "position"  # what is stored of a word beside its chunks: how often it is in them, and where
HEAP_BYTES = 32_000_000
EXTRA = 16  # fetched beyond k, so that ties at the end are broken by key
IN_QUERY_SHARE = 0.1  # filters that match a smaller share become part of the query
MAX_KEYS_IN_QUERY = 100_000
MAX_KEYS_ONE_BY_ONE = 1_000


class SparseIndex:
    """A BM25 index in its own folder. Searches may come from several threads, changes from one at a time."""

    def __init__(self, folder: Path, *, is_writable: bool, language: str = DEFAULT_LANGUAGE) -> None:
        """language: that its words are stemmed in."""
        tantivy = require("tantivy")
        self._lock = threading.RLock()
        self._writer: Any = None
        self._copy: TemporaryDirectory[str] | None = None
        self.folder = folder
        self.language = language
        self._has_positions = is_writable or not is_outdated(folder)
        if is_writable:
            folder.mkdir(parents=True, exist_ok=True)
            self._index = tantivy.Index(_schema(tantivy), str(folder))
        elif os.access(folder, os.W_OK):
            self._index = tantivy.Index.open(str(folder))
        else:  # tantivy needs to lock a file even for reading
            self._copy = TemporaryDirectory(prefix="kvarn-")
            shutil.copytree(folder, self._copy.name, dirs_exist_ok=True, copy_function=shutil.copyfile)
            Path(self._copy.name).chmod(0o700)  # copytree has copied the read-only mode
            self._index = tantivy.Index.open(self._copy.name)

    def __len__(self) -> int:
        return int(self._searcher().num_docs)

    @property
    def num_removed(self) -> int:
        """Removed chunks that still count in the statistics."""
        try:
            segments = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))["segments"]
            return sum((segment.get("deletes") or {}).get("num_deleted_docs", 0) for segment in segments)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # another process has replaced it
            return 0

    def change(self, added: Iterable[tuple[int, str]], removed: Iterable[int], *, is_replay: bool = True) -> None:
        """Remove and add chunks, and commit. is_replay: some of the added keys may be there already."""
        with self._lock:
            try:
                self._write(added, removed, is_replay)
            except ValueError as error:  # tantivy raises it for everything, including a full disk
                self._writer = None  # a writer that failed once stays broken
                raise StorageError(f"{self.folder}: {error}; check the disk and try again") from error
            self._index.reload()

    def _write(self, added: Iterable[tuple[int, str]], removed: Iterable[int], is_replay: bool) -> None:
        document = require("tantivy").Document
        if self._writer is None:
            self._writer = self._index.writer(HEAP_BYTES, 1)
        for key in removed:
            self._writer.delete_documents_by_term("key", key)
        for key, text in added:
            if is_replay:
                self._writer.delete_documents_by_term("key", key)
            self._writer.add_document(document(key=key, text=" ".join(terms(text, self.language))))
        self._writer.commit()

    def reload(self) -> None:
        """See what another process has committed."""
        self._index.reload()

    def search(self, query: str, k: int, allowed: Sequence[int] | None = None) -> Scores:
        """The k best chunks that share a term with the query, best first; only among the allowed keys if given."""
        asked, searcher = self._query(query), self._searcher()
        if asked is None or not searcher.num_docs:
            return Scores.of([])
        if allowed is None:
            return _best(self._hits(searcher, asked, k + EXTRA), k)
        if len(allowed) <= min(MAX_KEYS_IN_QUERY, IN_QUERY_SHARE * searcher.num_docs):
            return _best(self._hits(searcher, self._within(asked, allowed), k + EXTRA), k)
        return self._filtered(searcher, asked, k, np.array(allowed, np.int64))

    def scores(self, query: str, keys: Keys) -> Scores:
        """BM25 of the given chunks; those that share no term with the query are left out."""
        asked, searcher = self._query(query), self._searcher()
        if asked is None or not len(keys) or not searcher.num_docs:
            return Scores.of([])
        return self._hits(searcher, self._within(asked, keys.tolist()), len(keys))

    def limit(self, query: str) -> float:
        """The score that no chunk exceeds by the words of a query; phrases come on top."""
        counts = Counter(query_terms(query, self.language))
        frequencies = self.document_frequencies(counts)
        return bm25_limit([(frequencies[term], count) for term, count in counts.items()], len(self))

    def document_frequencies(self, terms: Iterable[str]) -> dict[str, int]:
        """How many chunks have each of some terms."""
        searcher = self._searcher()
        return {term: searcher.doc_freq("text", term) for term in terms}

    def close(self) -> None:
        """Wait for merges to end and release the folder."""
        with self._lock:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.wait_merging_threads()
            if self._copy is not None:
                self._copy.cleanup()

    def _filtered(self, searcher: Any, query: Any, k: int, allowed: Keys) -> Scores:
        """Fetch more and more until k of them are allowed."""
        count = 2 * (k + EXTRA)
        while True:
            hits = self._hits(searcher, query, count)
            is_allowed = np.isin(hits.keys, allowed)
            if is_allowed.sum() >= k or len(hits) < count:
                return _best(Scores(hits.keys[is_allowed], hits.values[is_allowed]), k)
            count *= 4

    def _hits(self, searcher: Any, query: Any, count: int) -> Scores:
        found = searcher.search(query, min(count, searcher.num_docs), count=False).hits
        keys = searcher.fast_field_values("key", [address for _, address in found])
        return Scores(np.array(keys, np.int64), np.array([score for score, _ in found], np.float64))

    def _query(self, text: str) -> Any:
        """The terms and the phrases of a query; None if there are none."""
        tantivy = require("tantivy")
        asked = []
        for term, count in Counter(query_terms(text, self.language)).items():
            one = self._term(term)
            asked.append(one if count == 1 else tantivy.Query.boost_query(one, float(count)))
        asked += map(self._phrase, quoted_phrases(text, self.language) if self._has_positions else ())
        return tantivy.Query.boolean_query([(tantivy.Occur.Should, one) for one in asked]) if asked else None

    def _phrase(self, phrase: Sequence[str]) -> Any:
        """A single word in quotation marks counts once more."""
        if len(phrase) == 1:
            return self._term(phrase[0])
        return require("tantivy").Query.phrase_query(self._index.schema, "text", list(phrase))

    def _term(self, term: str) -> Any:
        return require("tantivy").Query.term_query(self._index.schema, "text", term, "freq")

    def _within(self, query: Any, keys: Sequence[int]) -> Any:
        """The query among some keys. A few of them are found sooner one by one than as a set."""
        tantivy = require("tantivy")
        must, should, schema = tantivy.Occur.Must, tantivy.Occur.Should, self._index.schema
        if len(keys) <= MAX_KEYS_ONE_BY_ONE:
            one_by_one = [(should, tantivy.Query.term_query(schema, "key", key, "basic")) for key in keys]
            allowed = tantivy.Query.boolean_query(one_by_one)
        else:
            allowed = tantivy.Query.term_set_query(schema, "key", list(keys))
        return tantivy.Query.boolean_query([(must, query), (must, tantivy.Query.const_score_query(allowed, 0.0))])

    def _searcher(self) -> Any:
        return self._index.searcher()


def is_outdated(folder: Path) -> bool:
    """Whether an index was made by a version that stored no positions of words, so that it knows no phrases."""
    try:
        fields = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["schema"]
        (text,) = [field["options"]["indexing"] for field in fields if field["name"] == "text"]
        return bool(text["record"] != RECORD)
    except (OSError, ValueError, LookupError, TypeError):  # missing or damaged, which is seen elsewhere
        return False


def _best(scores: Scores, k: int) -> Scores:
    """The k highest, best first; among equal ones the lower key first."""
    order = np.lexsort((scores.keys, -scores.values))[:k]
    return Scores(scores.keys[order], scores.values[order])


def _schema(tantivy: Any) -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_integer_field("key", indexed=True, fast=True)
    builder.add_text_field("text", tokenizer_name="whitespace", index_option=RECORD)
    return builder.build()
