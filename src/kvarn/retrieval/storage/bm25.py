"""The sparse index of one collection: BM25 over the terms of analyse.py (tantivy). Knows keys and texts.

k1 is 1.2 and b 0.75; a chunk's length is rounded to one byte. Until optimised, statistics still count removed chunks.
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
from kvarn.retrieval.search.fusion import top_k
from kvarn.retrieval.storage.text_analysis import terms
from kvarn.retrieval.types import Scored

HEAP_BYTES = 32_000_000
EXTRA = 16  # fetched beyond k, so that equal scores at the end are chosen by key
SCAN_SHARE = 0.1  # filters that let less than this pass are put into the query
MAX_SET = 100_000  # keys in one query


class SparseIndex:
    """BM25 in a folder of its own. Searches may come from several threads, changes from one at a time."""

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
        else:  # tantivy locks a file to read, too
            self._copy = TemporaryDirectory(prefix="kvarn-")
            shutil.copytree(folder, self._copy.name, dirs_exist_ok=True, copy_function=shutil.copyfile)
            Path(self._copy.name).chmod(0o700)  # copytree gave it the rights of the original
            self._index = tantivy.Index.open(self._copy.name)

    def __len__(self) -> int:
        return int(self._searcher().num_docs)

    def change(self, added: Iterable[tuple[int, str]], removed: Iterable[int]) -> None:
        """Remove and add chunks, replacing known keys, and make it durable and visible."""
        with self._lock:
            try:
                self._write(added, removed)
            except ValueError as error:  # what tantivy raises for everything, a full disk among it
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
        """See what another process has written."""
        self._index.reload()

    def search(self, query: str, k: int, allowed: Sequence[int] | None = None) -> list[Scored]:
        """The k best chunks that share a term with the query, best first; only among allowed ones if given."""
        wanted = Counter(terms(query))
        searcher = self._searcher()
        if not wanted or not searcher.num_docs:
            return []
        if allowed is None:
            return top_k(self._hits(searcher, self._query(wanted), k + EXTRA), k)
        if len(allowed) <= min(MAX_SET, SCAN_SHARE * searcher.num_docs):
            return top_k(self._hits(searcher, self._within(self._query(wanted), allowed), k + EXTRA), k)
        return self._filtered(searcher, self._query(wanted), k, set(allowed))

    def close(self) -> None:
        """Let merges end and give the folder free."""
        with self._lock:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.wait_merging_threads()
            if self._copy is not None:
                self._copy.cleanup()

    def _filtered(self, searcher: Any, query: Any, k: int, allowed: set[int]) -> list[Scored]:
        """Fetch more and more until enough of them pass."""
        count = 2 * (k + EXTRA)
        while True:
            hits = self._hits(searcher, query, count)
            passing = [hit for hit in hits if hit[0] in allowed]
            if len(passing) >= k or len(hits) < count:
                return top_k(passing, k)
            count *= 4

    def _hits(self, searcher: Any, query: Any, count: int) -> list[Scored]:
        found = searcher.search(query, min(count, searcher.num_docs), count=False).hits
        keys = searcher.fast_field_values("key", [address for _, address in found])
        return [(int(key), float(score)) for key, (score, _) in zip(keys, found, strict=True)]

    def _query(self, wanted: Counter[str]) -> Any:
        tantivy = require("tantivy")
        parts = []
        for term, count in wanted.items():
            one = tantivy.Query.term_query(self._index.schema, "text", term, "freq")
            parts.append((tantivy.Occur.Should, one if count == 1 else tantivy.Query.boost_query(one, float(count))))
        return tantivy.Query.boolean_query(parts)

    def _within(self, query: Any, keys: Sequence[int]) -> Any:
        tantivy = require("tantivy")
        allowed = tantivy.Query.term_set_query(self._index.schema, "key", list(keys))
        silent = tantivy.Query.const_score_query(allowed, 0.0)
        return tantivy.Query.boolean_query([(tantivy.Occur.Must, query), (tantivy.Occur.Must, silent)])

    def _searcher(self) -> Any:
        return self._index.searcher()


def _schema(tantivy: Any) -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_integer_field("key", indexed=True, fast=True)
    builder.add_text_field("text", tokenizer_name="whitespace", index_option="freq")
    return builder.build()
