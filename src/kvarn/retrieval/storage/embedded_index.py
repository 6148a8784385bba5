"""The embedded Retriever: a document store in SQLite, an HNSW graph and a BM25 index beside it.

    put: store committed -> graph changed in memory, BM25 committed -> at a checkpoint: graph saved, manifest written

A crash at any point leaves the store intact; opening brings both indexes up to its version, starting from the
manifest's, or rebuilds a damaged one. Knows vectors and texts; knows no models.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from kvarn.errors import RetrievalError, StorageError
from kvarn.retrieval.filters import Condition
from kvarn.retrieval.scores import ChunkCandidates, Keys, Scales, Scores
from kvarn.retrieval.storage.document_store import DocumentStore
from kvarn.retrieval.storage.folder import FolderLock, lock_for_writing
from kvarn.retrieval.storage.hnsw import NOTHING, DenseIndex
from kvarn.retrieval.storage.index_sync import IndexSync
from kvarn.retrieval.types import EmbeddedDocument, Float32, Scored

log = logging.getLogger("kvarn.retrieval")
RETRY_S = 5.0
SAMPLED_CHUNKS = 1024  # whose cosines with a query are what is nothing special
BULK_CHUNKS = 4096  # by which the indexes may be behind the store while many documents are added


class EmbeddedIndex:
    """A collection in one folder; the process that may change it holds the folder's lock."""

    def __init__(self, folder: Path, *, seed: int = 0, read_only: bool = False) -> None:
        self.folder = folder
        self._lock = threading.RLock()  # changes; searches need none
        self._num_bulks = 0  # additions of many documents, that are under way
        self._num_pending = 0  # chunks that the store has and the indexes may not
        self._retry_at = 0.0  # time.monotonic() when an index that could not follow is tried again
        self._folder_lock: FolderLock | None = None if read_only else lock_for_writing(folder)
        self.is_writable = self._folder_lock is not None
        try:
            self.store = DocumentStore(folder, is_writable=self.is_writable)
            self._seed = int(self.store.meta("seed", seed))
            self._matching: tuple[tuple[int, Condition], list[int]] | None = None  # (version, condition), keys
            self._sampled: tuple[int, Float32] | None = None  # version, mean vector
            self._counted = (-1, 0)  # version, chunks
            self._sync = IndexSync(folder, self.store, self._seed, is_writable=self.is_writable)
        except BaseException:
            self._release()
            raise

    @property
    def version(self) -> int:
        return self.store.version if not self.is_writable else self._sync.version

    @property
    def num_chunks(self) -> int:
        """Counted once per version: SQLite walks a whole index for it."""
        version, count = self._counted
        if version != self.version:
            version, count = self._counted = (self.version, self.store.num_chunks)
        return count

    @property
    def language(self) -> str:
        """The language whose stop words and stems its words have."""
        return self._sync.sparse.language

    @property
    def dim(self) -> int | None:
        dim = self.store.meta("dim")
        return None if dim is None else int(dim)

    def put(self, documents: Sequence[EmbeddedDocument]) -> None:
        """Add or replace documents: after a crash all of them are there, or none."""
        with self._lock:
            self._agree_on_dim(documents)
            version = self.store.put(documents)
            self._num_pending += sum(len(document.chunks) for document in documents)
            if not self._num_bulks or self._num_pending >= BULK_CHUNKS:
                self._follow(version)

    def writing(self) -> AbstractContextManager[None]:
        """The lock on the folder is held anyway."""
        return nullcontext()

    @contextmanager
    def bulk(self) -> Iterator[None]:
        """While documents are changed in many parts: what is put is durable at once, and found a little later.

        Every commit of the BM25 index waits for the disk; one for some thousand chunks costs as much as one for ten.
        At the end removed chunks are dropped from its statistics, where that is quick.
        """
        with self._lock:
            self._num_bulks += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_bulks -= 1
                if self._num_pending:
                    self._follow(self.store.version)
        with self._lock:
            if not self._num_bulks and self.is_writable:
                self._drop_removed()

    def rename(self, moves: Mapping[str, str]) -> Mapping[str, str]:
        """Give documents new ids and sources, all or none, and remove those that had them; returns what was done."""
        with self._lock:
            self._follow(self.store.rename(moves))
        return moves

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""
        with self._lock:
            num_removed, version = self.store.remove(document_ids)
            self._follow(version)
        return num_removed

    def dense(self, vector: Float32, k: int, where: Condition | None) -> list[Scored]:
        """The k nearest chunks by cosine, best first."""
        graph = self._graph(vector)
        return [] if graph is None else graph.search(vector, k, self._allowed(where))

    def _graph(self, vector: Float32) -> DenseIndex | None:
        """The graph, as of now; None as long as there is no vector."""
        self._refresh()
        graph = self._sync.dense
        if graph is not None and vector.shape != (graph.dim,):
            raise RetrievalError(
                f"the query's vector has {vector.shape[-1]} dimensions, the collection's have {graph.dim}; "
                "embed with the model the collection was made with"
            )
        return graph

    def sparse(self, query: str, k: int, where: Condition | None) -> list[Scored]:
        """The k best chunks by BM25."""
        return self._by_words(query, k, where).pairs()

    def _by_words(self, query: str, k: int, where: Condition | None) -> Scores:
        self._refresh()
        if self._sync.is_behind and time.monotonic() >= self._retry_at:
            with self._lock:
                self._follow(self._sync.version)
        return self._sync.sparse.search(query, k, self._allowed(where))

    def candidates(self, query: str, vector: Float32, depth: int, where: Condition | None) -> ChunkCandidates:
        """The chunks that are among the best by meaning or by words, as many of each."""
        by_words = self._by_words(query, depth, where)
        graph = self._graph(vector)
        if graph is None:
            return ChunkCandidates(NOTHING, NOTHING, 0.0, 0.0)
        near = graph.nearest(vector, depth, self._allowed(where))
        max_other_cosine = float(near.values[-1]) if len(near) >= depth else 1.0
        max_other_bm25 = float(by_words.values[-1]) if len(by_words) >= depth else 0.0
        return ChunkCandidates(near, by_words, max_other_cosine, max_other_bm25)

    def cosines(self, vector: Float32, keys: Keys) -> Scores:
        """Cosines of the given chunks in the graph's precision; those that it does not hold are left out."""
        graph = self._sync.dense
        return NOTHING if graph is None else graph.cosines(vector, keys)

    def bm25(self, query: str, keys: Keys) -> Scores:
        """BM25 of the given chunks; those that share no term with the query are left out."""
        return self._sync.sparse.scores(query, keys)

    def document_frequencies(self, terms: Sequence[str]) -> dict[str, int]:
        """How many chunks have each of some terms."""
        return self._sync.sparse.document_frequencies(terms)

    def scales(self, query: str, vector: Float32) -> Scales:
        """What the scores of a query are measured by; the sample of chunks is drawn once per version."""
        graph, version = self._graph(vector), self._sync.version
        if graph is None:
            return Scales(0.0, 0.0)
        cached = self._sampled
        if cached is None or cached[0] != version:
            cached = self._sampled = (version, graph.mean(SAMPLED_CHUNKS))
        return Scales(float(cached[1] @ vector), self._sync.sparse.limit(query))

    def flush(self) -> None:
        """Save the graph and write the manifest, which makes the next open after a crash fast."""
        with self._lock:
            if self._sync.is_behind:
                self._follow(self._sync.version)
            if not self._sync.is_behind:
                self._sync.save()

    def optimise(self) -> None:
        """Rebuild both indexes from the store, without what removed documents have left."""
        with self._lock:
            self._sync.rebuild()

    def check(self) -> None:
        """Raise unless the store and both indexes hold the same chunks."""
        self.store.check()
        graph, num_texts = self._sync.dense, len(self._sync.sparse)
        num_chunks, num_dense = self.num_chunks, 0 if graph is None else len(graph)
        if not num_chunks == num_dense == num_texts:
            raise StorageError(f"{num_chunks} chunks, {num_dense} vectors and {num_texts} texts are indexed")

    def close(self) -> None:
        """Save what is not saved yet and unlock the folder."""
        with self._lock:
            try:
                self.flush()
            finally:
                self._release()

    def _refresh(self) -> None:
        """In a process that only reads: see what the writing one has committed."""
        if self.is_writable:
            return
        with self._lock:
            version = self.store.version
            if version != self._sync.version:
                self._sync.refresh(version)

    def _follow(self, version: int) -> None:
        """Bring the indexes to a version of the store. What the store has is stored, also if they cannot follow yet.

        On a full disk the BM25 index cannot be written: it is tried again with the next change, and now and then with
        a search.
        """
        try:
            self._sync.catch_up(version, in_bulk=self._num_bulks > 0)
            self._num_pending = 0
        except (StorageError, OSError, RuntimeError) as error:
            self._retry_at = time.monotonic() + RETRY_S
            log.warning("an index could not follow the documents of %s and is tried again: %s", self.folder, error)

    def _drop_removed(self) -> None:
        try:
            self._sync.drop_removed()
        except (StorageError, OSError, ValueError, RuntimeError) as error:
            log.warning("removed documents of %s still count in the scores: %s", self.folder, error)

    def _allowed(self, where: Condition | None) -> list[int] | None:
        """Keys that meet a condition; kept, because a hybrid search needs them twice."""
        if where is None:
            return None
        key = (self._sync.version, where)
        cached = self._matching
        if cached is None or cached[0] != key:
            cached = self._matching = (key, self.store.matching(where))
        return cached[1]

    def _agree_on_dim(self, documents: Sequence[EmbeddedDocument]) -> None:
        dims = {document.vectors.shape[1] for document in documents if len(document.vectors)}
        dims |= {self.dim} - {None}
        if len(dims) > 1:
            raise RetrievalError(
                f"vectors of {' and '.join(map(str, sorted(filter(None, dims))))} dimensions cannot be in one "
                "collection; embed with the model it was made with"
            )
        if dims and self.dim is None:
            self.store.set_meta({"dim": dims.pop(), "seed": self._seed})

    def _release(self) -> None:
        for name in ("_sync", "store"):  # missing if the constructor failed before it
            opened = getattr(self, name, None)
            if opened is not None:
                opened.close()
        if self._folder_lock is not None:
            self._folder_lock.release()
            self._folder_lock = None
