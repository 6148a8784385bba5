"""The embedded store: truth in SQLite, an HNSW graph and a BM25 index beside it, and the order they are written in.

    put: truth committed -> graph in memory, BM25 committed -> now and then: graph saved, manifest last

A crash at any point leaves the truth whole; opening brings both indexes up to it, from the manifest's version on, or
makes a damaged one again. Knows vectors and texts; knows no models.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvarn.errors import RetrievalError, StorageError
from kvarn.retrieval.filters import Condition
from kvarn.retrieval.storage.document_store import DocumentStore
from kvarn.retrieval.storage.folder import FolderLock, claim
from kvarn.retrieval.storage.index_sync import IndexSync
from kvarn.retrieval.types import ChunkRecord, Float32, Scored, StoredChunk


class EmbeddedIndex:
    """A collection in one folder; the process that may change it holds its lock."""

    def __init__(self, folder: Path, *, seed: int = 0, read_only: bool = False) -> None:
        self.folder = folder
        self._lock = threading.RLock()  # changes; searches need none
        self._folder_lock: FolderLock | None = None if read_only else claim(folder)
        self.is_writable = self._folder_lock is not None
        try:
            self._truth = DocumentStore(folder, is_writable=self.is_writable)
            self._seed = int(self._truth.fact("seed", seed))
            self._matching: tuple[tuple[int, Condition], list[int]] | None = None
            self._counted = (-1, 0)  # version, chunks
            self._parts = IndexSync(folder, self._truth, self._seed, is_writable=self.is_writable)
        except BaseException:
            self._give_free()
            raise

    @property
    def version(self) -> int:
        return self._truth.version if not self.is_writable else self._parts.version

    @property
    def num_chunks(self) -> int:
        """Counted once per version: SQLite walks a whole index for it."""
        version, count = self._counted
        if version != self.version:
            version, count = self._counted = (self.version, self._truth.num_chunks)
        return count

    @property
    def dim(self) -> int | None:
        dim = self._truth.fact("dim")
        return None if dim is None else int(dim)

    def put(self, entries: Sequence[ChunkRecord]) -> None:
        """Add or replace documents: after a crash all of them are there, or none."""
        with self._lock:
            self._agree_on_dim(entries)
            self._parts.bring(self._truth.put(entries))

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""
        with self._lock:
            num_removed, version = self._truth.remove(document_ids)
            self._parts.bring(version)
        return num_removed

    def dense(self, vector: Float32, k: int, where: Condition | None) -> list[Scored]:
        """The k chunks nearest by cosine, best first."""
        self._follow()
        graph = self._parts.dense
        if graph is None:
            return []
        if vector.shape != (graph.dim,):
            raise RetrievalError(
                f"the query's vector has {vector.shape[-1]} dimensions, the collection's have {graph.dim}; "
                "embed with the model the collection was made with"
            )
        return graph.search(vector, k, self._allowed(where))

    def sparse(self, query: str, k: int, where: Condition | None) -> list[Scored]:
        """The k best chunks by BM25."""
        self._follow()
        return self._parts.sparse.search(query, k, self._allowed(where))

    def chunks(self, keys: Sequence[int]) -> Mapping[int, StoredChunk]:
        return self._truth.chunks(keys)

    def vectors(self, keys: Sequence[int]) -> Mapping[int, Float32]:
        return self._truth.vectors(keys)

    def digests(self, document_ids: Sequence[str]) -> Mapping[str, bytes]:
        return self._truth.digests(document_ids)

    def owners(self, digests: Sequence[bytes]) -> Mapping[bytes, str]:
        return self._truth.owners(digests)

    def ids_from(self, source: str) -> list[str]:
        return self._truth.ids_from(source)

    def documents(self) -> list[dict[str, Any]]:
        return self._truth.documents()

    def fact(self, name: str, default: Any = None) -> Any:
        return self._truth.fact(name, default)

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        self._truth.set_facts(facts)

    def flush(self) -> None:
        """Save the graph and write the manifest: what follows a crash is then quick."""
        with self._lock:
            self._parts.save()

    def optimise(self) -> None:
        """Make both indexes anew from the truth, as if nothing had ever been removed."""
        with self._lock:
            self._parts.rebuild()

    def check(self) -> None:
        """Raise unless truth and indexes hold the same chunks."""
        self._truth.check()
        graph, num_texts = self._parts.dense, len(self._parts.sparse)
        num_chunks, num_dense = self.num_chunks, 0 if graph is None else len(graph)
        if not num_chunks == num_dense == num_texts:
            raise StorageError(f"{num_chunks} chunks, {num_dense} vectors and {num_texts} texts are indexed")

    def close(self) -> None:
        """Save what is not saved yet and give the folder free."""
        with self._lock:
            try:
                self.flush()
            finally:
                self._give_free()

    def _follow(self) -> None:
        """In a process that only reads: see what the writing one has committed."""
        if self.is_writable:
            return
        with self._lock:
            version = self._truth.version
            if version != self._parts.version:
                self._parts.follow(version)

    def _allowed(self, where: Condition | None) -> list[int] | None:
        """Keys that meet a condition; both kinds of search ask, one query is enough."""
        if where is None:
            return None
        key = (self._parts.version, where)
        known = self._matching
        if known is None or known[0] != key:
            known = self._matching = (key, self._truth.matching(where))
        return known[1]

    def _agree_on_dim(self, entries: Sequence[ChunkRecord]) -> None:
        dims = {entry.vectors.shape[1] for entry in entries if len(entry.vectors)}
        dims |= {self.dim} - {None}
        if len(dims) > 1:
            raise RetrievalError(
                f"vectors of {' and '.join(map(str, sorted(filter(None, dims))))} dimensions cannot be in one "
                "collection; embed with the model it was made with"
            )
        if dims and self.dim is None:
            self._truth.set_facts({"dim": dims.pop(), "seed": self._seed})

    def _give_free(self) -> None:
        for name in ("_parts", "_truth"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        if self._folder_lock is not None:
            self._folder_lock.release()
            self._folder_lock = None
