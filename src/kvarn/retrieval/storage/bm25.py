"""The sparse index of one collection: BM25 over the terms of text_analysis.py (tantivy). Knows keys and texts.

k1 is 1.2 and b 0.75; a chunk's length is rounded to one byte. Until it is rebuilt, its statistics count removed chunks.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvarn.errors import StorageError
from kvarn.retrieval.extras import require
from kvarn.retrieval.text_analysis import terms
from kvarn.retrieval.top_k import top_k
from kvarn.retrieval.types import Scored

HEAP_BYTES = 32_000_000
EXTRA = 16  # fetched beyond k, so that ties at the end are broken by key
IN_QUERY_SHARE = 0.1  # filters that match a smaller share become part of the query
MAX_KEYS_IN_QUERY = 100_000


class SparseIndex:
    """A BM25 index in its own folder. Searches may come from several threads, changes from one at a time."""

    def __init__(self, folder: Path, *, is_writable: bool) -> None:
        tantivy = require("tantivy")
        self._lock = threading.RLock()
        self._writer: Any = None
        self._copy: TemporaryDirectory[str] | None = None
        self.folder = folder
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

    def change(self, added: Iterable[tuple[int, str]], removed: Iterable[int]) -> None:
        """Remove and add chunks, replacing existing keys, and commit."""
        with self._lock:
            try:
                self._write(added, removed)
            except ValueError as error:  # tantivy raises it for everything, including a full disk
                self._writer = None  # a writer that failed once stays broken
                raise StorageError(f"{self.folder}: {error}; check the disk and try again") from error
            self._index.reload()

    def _write(self, added: Iterable[tuple[int, str]], removed: Iterable[int]) -> None:
        document = require("tantivy").Document
        if self._writer is None:
            self._writer = self._index.writer(HEAP_BYTES, 1)
        for key in removed:
            self._writer.delete_documents_by_term("key", key)
        for key, text in added:
            self._writer.delete_documents_by_term("key", key)
            self._writer.add_document(document(key=key, text=" ".join(terms(text))))
        self._writer.commit()

    def reload(self) -> None:
        """See what another process has committed."""
        self._index.reload()

    def search(self, query: str, k: int, allowed: Sequence[int] | None = None) -> list[Scored]:
        """The k best chunks that share a term with the query, best first; only among the allowed keys if given."""
        query_terms = Counter(terms(query))
        searcher = self._searcher()
        if not query_terms or not searcher.num_docs:
            return []
        if allowed is None:
            return top_k(self._hits(searcher, self._query(query_terms), k + EXTRA), k)
        if len(allowed) <= min(MAX_KEYS_IN_QUERY, IN_QUERY_SHARE * searcher.num_docs):
            return top_k(self._hits(searcher, self._within(self._query(query_terms), allowed), k + EXTRA), k)
        return self._filtered(searcher, self._query(query_terms), k, set(allowed))

    def close(self) -> None:
        """Wait for merges to end and release the folder."""
        with self._lock:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.wait_merging_threads()
            if self._copy is not None:
                self._copy.cleanup()

    def _filtered(self, searcher: Any, query: Any, k: int, allowed: set[int]) -> list[Scored]:
        """Fetch more and more until k of them are allowed."""
        count = 2 * (k + EXTRA)
        while True:
            hits = self._hits(searcher, query, count)
            matching = [hit for hit in hits if hit[0] in allowed]
            if len(matching) >= k or len(hits) < count:
                return top_k(matching, k)
            count *= 4

    def _hits(self, searcher: Any, query: Any, count: int) -> list[Scored]:
        found = searcher.search(query, min(count, searcher.num_docs), count=False).hits
        keys = searcher.fast_field_values("key", [address for _, address in found])
        return [(int(key), float(score)) for key, (score, _) in zip(keys, found, strict=True)]

    def _query(self, query_terms: Counter[str]) -> Any:
        tantivy = require("tantivy")
        clauses = []
        for term, count in query_terms.items():
            one = tantivy.Query.term_query(self._index.schema, "text", term, "freq")
            clauses.append((tantivy.Occur.Should, one if count == 1 else tantivy.Query.boost_query(one, float(count))))
        return tantivy.Query.boolean_query(clauses)

    def _within(self, query: Any, keys: Sequence[int]) -> Any:
        tantivy = require("tantivy")
        allowed = tantivy.Query.term_set_query(self._index.schema, "key", list(keys))
        unscored = tantivy.Query.const_score_query(allowed, 0.0)
        return tantivy.Query.boolean_query([(tantivy.Occur.Must, query), (tantivy.Occur.Must, unscored)])

    def _searcher(self) -> Any:
        return self._index.searcher()


def _schema(tantivy: Any) -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_integer_field("key", indexed=True, fast=True)
    builder.add_text_field("text", tokenizer_name="whitespace", index_option="freq")
    return builder.build()
