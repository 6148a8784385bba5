"""The Retriever on Milvus: changes that take effect as a whole, and searches over the valid rows.

What an interrupted change leaves behind is removed before the next one. One process changes a collection at a time;
Milvus has no lock to enforce it. Knows queries and changes; rows and versions are store.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvarn.errors import RetrievalError
from kvarn.retrieval.filters import Condition
from kvarn.retrieval.milvus.expressions import listed, to_expression
from kvarn.retrieval.milvus.rows import rows_of
from kvarn.retrieval.milvus.store import BATCH, MilvusStore, storage_errors
from kvarn.retrieval.text_analysis import terms
from kvarn.retrieval.types import MAX_K, EmbeddedDocument, Float32, Scored

EXPANSION_SEARCH = 96
MAX_ATTEMPTS = 3  # of a search whose rows are being replaced


class MilvusIndex:
    """A Retriever on Milvus. uri: http://host:19530, or a path that ends in .db."""

    is_writable = True  # Milvus has no lock that could say otherwise

    def __init__(self, uri: str, name: str, *, token: str = "") -> None:
        self.store = MilvusStore(uri, name, token=token)
        self._is_clean = False  # no incomplete change is left, by an earlier process or a failed change of ours

    @property
    def version(self) -> int:
        return self.store.commit().version

    @property
    def num_chunks(self) -> int:
        if self.store.dim is None:
            return 0
        visible = self.store.visible()
        with storage_errors():
            rows = self.store.client.query(self.store.name, filter=visible, output_fields=["count(*)"])
        return int(rows[0]["count(*)"])

    @property
    def dim(self) -> int | None:
        return None if self.store.dim is None else int(self.store.dim)

    def put(self, documents: Sequence[EmbeddedDocument]) -> None:
        """Add or replace documents: after a crash all of them are there, or none."""
        self._agree_on_dim({document.vectors.shape[1] for document in documents if len(document.vectors)})
        with self._changing() as version:
            rows = [row for document in documents for row in rows_of(document, version)]
            replaced = list(self.store.digests([document.id for document in documents]))
            for start in range(0, len(rows), BATCH):
                self.store.client.insert(self.store.name, rows[start : start + BATCH])
            self.store.record(version, is_replacing=bool(replaced))
            if replaced:
                self._delete(replaced, version)
                self.store.record(version)

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""
        known = list(self.store.digests(document_ids))
        with self._changing() as version:
            self._delete(known, version)
            self.store.record(version)
        return len(known)

    def dense(self, vector: Float32, k: int, where: Condition | None) -> list[Scored]:
        """The k nearest chunks by cosine, best first."""
        if self.store.dim is None:
            return []
        if vector.shape != (self.dim,):
            raise RetrievalError(f"the query's vector has {vector.shape[-1]} dimensions, the collection's {self.dim}")
        params = {"params": {"ef": max(EXPANSION_SEARCH, k)}}
        return self._search("vector", vector.tolist(), k, where, params)

    def sparse(self, query: str, k: int, where: Condition | None) -> list[Scored]:
        """The k best chunks by BM25."""
        words = " ".join(terms(query))
        found = self._search("sparse", words, k, where, {}) if words and self.store.dim is not None else []
        # A cluster reports BM25 as it is, milvus-lite as a negative distance; it is never below 0.
        return sorted(((key, abs(score)) for key, score in found), key=lambda pair: (-pair[1], pair[0]))

    def optimise(self) -> None:
        """Let Milvus merge its segments."""
        if self.store.dim is not None:
            with storage_errors():
                self.store.client.compact(self.store.name)

    def drop(self) -> None:
        """Remove everything."""
        with storage_errors():
            for name in (self.store.name, self.store.meta_name):
                self.store.client.drop_collection(name)

    def close(self) -> None:
        self.store.client.close()

    def _search(self, field: str, query: Any, k: int, where: Condition | None, params: dict[str, Any]) -> list[Scored]:
        condition = "" if where is None else f" and {to_expression(where)}"
        for _ in range(MAX_ATTEMPTS):
            commit = self.store.commit()
            visible = self.store.visible(commit)
            with storage_errors():
                (found,) = self.store.client.search(
                    self.store.name,
                    data=[query],
                    anns_field=field,
                    limit=min(k, MAX_K),
                    filter=visible + condition,
                    search_params=params,
                )
            if self.store.commit() == commit:  # else rows that were valid may have been removed during the search
                break
        scored = [(int(hit["key"]), float(hit["distance"])) for hit in found]
        return sorted(scored, key=lambda pair: (-pair[1], pair[0]))

    @contextmanager
    def _changing(self) -> Iterator[int]:
        """One change, under its new version; removes first what an incomplete one has left behind."""
        with storage_errors():
            if not self._is_clean:
                self.store.reread_commit()
                self._clean()
            self._is_clean = False
            yield self.store.commit().version + 1
            self._is_clean = True

    def _clean(self) -> None:
        if self.store.dim is None:
            return
        commit = self.store.commit()
        self.store.client.delete(self.store.name, filter=f"version > {commit.version}")
        if commit.is_replacing:
            self._delete(self.store.documents_of(commit), commit.version)
            self.store.record(commit.version)

    def _delete(self, documents: Sequence[str], before: int) -> None:
        """Remove the rows that documents had before a version."""
        for start in range(0, len(documents), BATCH):
            some = listed(documents[start : start + BATCH])
            self.store.client.delete(self.store.name, filter=f"version < {before} and document in {some}")

    def _agree_on_dim(self, dims: set[int]) -> None:
        known = dims | ({self.dim} - {None})
        if len(known) > 1:
            shown = " and ".join(map(str, sorted(filter(None, known))))
            raise RetrievalError(f"vectors of {shown} dimensions cannot be in one collection; embed with its own model")
        if self.store.dim is None and known:
            self.store.create(int(known.pop() or 0))
