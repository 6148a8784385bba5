"""The embedded store: truth in SQLite, an HNSW graph and a BM25 index beside it, and the order they are written in.

    put: truth committed -> graph in memory, BM25 committed -> now and then: graph saved, manifest last

A crash at any point leaves the truth whole; opening brings both indexes up to it, from the manifest's version on, or
makes a damaged one again. Knows vectors and texts; knows no models.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.errors import RetrievalError, StorageError
from kvarn.retrieval.dense import DenseIndex, file_digest
from kvarn.retrieval.filters import Condition
from kvarn.retrieval.folder import FolderLock, claim, file_digests, is_intact
from kvarn.retrieval.manifest import Manifest, read_manifest, write_manifest
from kvarn.retrieval.sparse import SparseIndex
from kvarn.retrieval.truth import Truth
from kvarn.retrieval.types import Entry, Float32, Scored, StoredChunk

CATCH_UP = 1024  # chunks read from the truth at a time
CHECKPOINT = 2048  # changed chunks; at least, see _is_due
CHECKPOINT_SHARE = 0.25


class EmbeddedIndex:
    """A collection in one folder; the process that may change it holds its lock."""

    def __init__(self, folder: Path, *, seed: int = 0, read_only: bool = False) -> None:
        self.folder = folder
        self._lock = threading.RLock()  # changes; searches need none
        self._folder_lock: FolderLock | None = None if read_only else claim(folder)
        self.is_writable = self._folder_lock is not None
        try:
            self._truth = Truth(folder, is_writable=self.is_writable)
            self._seed = int(self._truth.fact("seed", seed))
            self._dense: DenseIndex | None = None
            self._matching: tuple[tuple[int, Condition], list[int]] | None = None
            self._counted = (-1, 0)  # version, chunks
            self._open_parts()
        except BaseException:
            self._give_free()
            raise

    @property
    def version(self) -> int:
        return self._truth.version if not self.is_writable else self._version

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

    def put(self, entries: Sequence[Entry]) -> None:
        """Add or replace documents: after a crash all of them are there, or none."""
        with self._lock:
            self._agree_on_dim(entries)
            self._apply(self._truth.put(entries))

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""
        with self._lock:
            num_removed, version = self._truth.remove(document_ids)
            self._apply(version)
        return num_removed

    def dense(self, vector: Float32, k: int, where: Condition | None) -> list[Scored]:
        """The k chunks nearest by cosine, best first."""
        self._follow()
        if self._dense is None:
            return []
        if vector.shape != (self._dense.dim,):
            raise RetrievalError(
                f"the query's vector has {vector.shape[-1]} dimensions, the collection's have {self._dense.dim}; "
                "embed with the model the collection was made with"
            )
        return self._dense.search(vector, k, self._allowed(where))

    def sparse(self, query: str, k: int, where: Condition | None) -> list[Scored]:
        """The k best chunks by BM25."""
        self._follow()
        return self._sparse.search(query, k, self._allowed(where))

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
            if self.is_writable and self._saved != self._version:
                self._checkpoint()

    def optimise(self) -> None:
        """Make both indexes anew from the truth, as if nothing had ever been removed."""
        with self._lock:
            self._require_writable()
            self._rebuild_sparse()
            self._rebuild_dense()
            self._checkpoint()

    def check(self) -> None:
        """Raise unless truth and indexes hold the same chunks."""
        self._truth.check()
        num_chunks, num_dense = self.num_chunks, 0 if self._dense is None else len(self._dense)
        if not num_chunks == num_dense == len(self._sparse):
            raise StorageError(f"{num_chunks} chunks, {num_dense} vectors and {len(self._sparse)} texts are indexed")

    def close(self) -> None:
        """Save what is not saved yet and give the folder free."""
        with self._lock:
            try:
                self.flush()
            finally:
                self._give_free()

    def _open_parts(self) -> None:
        self._version = self._truth.version
        manifest = read_manifest(self.folder) or Manifest()
        self._dense_version = self._load_dense(manifest)
        self._sparse_version = self._load_sparse(manifest)
        if self.is_writable:
            self._bring_sparse(self._version)
            self._verify_sparse()
        self._bring_dense(self._version)
        if self._dense is not None and len(self._dense) != self.num_chunks and self.is_writable:
            self._rebuild_dense()
        self._saved = manifest.version
        self._changed = self._version - manifest.version
        if self.is_writable and self._saved != self._version:
            self._checkpoint()

    def _load_dense(self, manifest: Manifest) -> int:
        """Load the graph if it is whole; the version it stands for."""
        if self.dim is None:
            return 0
        self._dense = DenseIndex(self.dim, self._seed, self._truth.vectors)
        path = self.folder / manifest.dense
        try:
            if manifest.dense and file_digest(path) == manifest.dense_digest:
                self._dense.load(path)
                return manifest.version
        except (OSError, ValueError, RuntimeError):
            self._dense = DenseIndex(self.dim, self._seed, self._truth.vectors)
        return 0

    def _load_sparse(self, manifest: Manifest) -> int:
        """Open the BM25 index if it is whole; the version it is at least at."""
        folder = self.folder / (manifest.sparse or "sparse-0")
        if folder.exists() and is_intact(folder, manifest.sparse_files):
            try:
                self._sparse = SparseIndex(folder, is_writable=self.is_writable)
                len(self._sparse)
            except (ValueError, OSError):
                pass  # damaged: built anew from the truth, below
            else:
                return manifest.version
        self._require_writable()
        self._sparse = self._new_sparse()
        return 0

    def _new_sparse(self) -> SparseIndex:
        """An empty index under a name that was not used before."""
        numbers = [int(path.name.removeprefix("sparse-")) for path in self.folder.glob("sparse-*")]
        return SparseIndex(self.folder / f"sparse-{max(numbers, default=-1) + 1}", is_writable=True)

    def _bring_sparse(self, version: int) -> None:
        """Bring the BM25 index to a version of the truth; doing it twice does no harm."""
        added, removed = self._truth.changed_since(self._sparse_version)
        for start in range(0, max(len(added), 1), CATCH_UP):
            part = self._truth.chunks(added[start : start + CATCH_UP])
            texts = [(key, chunk.piece.searchable) for key, chunk in sorted(part.items())]
            gone = removed if start == 0 else []
            if texts or gone:
                self._sparse.change(texts, gone)
        self._sparse_version = version

    def _verify_sparse(self) -> None:
        if len(self._sparse) != self.num_chunks:
            self._rebuild_sparse()

    def _rebuild_sparse(self) -> None:
        old, self._sparse = self._sparse, self._new_sparse()
        old.close()
        self._sparse_version = 0
        self._bring_sparse(self._version)

    def _rebuild_dense(self) -> None:
        if self.dim is not None:
            self._dense, self._dense_version = DenseIndex(self.dim, self._seed, self._truth.vectors), 0
            self._bring_dense(self._version)

    def _bring_dense(self, version: int) -> None:
        """Bring the graph to a version of the truth."""
        if self._dense is None and self.dim is not None:
            self._dense = DenseIndex(self.dim, self._seed, self._truth.vectors)
        if self._dense is not None:
            added, removed = self._truth.changed_since(self._dense_version)
            self._dense.remove(removed)
            for start in range(0, len(added), CATCH_UP):
                vectors = self._truth.vectors(added[start : start + CATCH_UP])
                keys = sorted(vectors)
                self._dense.add(keys, np.array([vectors[key] for key in keys], np.float32))
        self._dense_version = version

    def _apply(self, version: int) -> None:
        """Bring both indexes to a version that the truth has just reached."""
        self._changed += len(self._truth.changed_since(self._version)[0]) + 1
        self._version = version
        self._bring_sparse(version)  # from where each stands: one that failed the last time catches up
        self._bring_dense(version)
        if self._changed > max(CHECKPOINT, CHECKPOINT_SHARE * self.num_chunks):
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Save the graph, write the manifest, then remove what it no longer names."""
        name = f"dense-{self._version}.usearch" if self._dense is not None else ""
        if self._dense is not None:
            self._dense.save(self.folder / name)
        digest = file_digest(self.folder / name) if name else ""
        sparse = self._sparse.folder
        write_manifest(self.folder, Manifest(self._version, name, digest, sparse.name, file_digests(sparse)))
        self._truth.forget_removed(self._version)
        self._saved, self._changed = self._version, 0
        for path in self.folder.glob("dense-*"):
            if path.name != name:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("sparse-*"):
            if path != sparse:
                shutil.rmtree(path, ignore_errors=True)

    def _follow(self) -> None:
        """In a process that only reads: see what the writing one has committed."""
        if self.is_writable:
            return
        with self._lock:
            version = self._truth.version
            if version == self._version:
                return
            self._bring_dense(version)
            self._sparse.reload()
            self._version = version
            if self._dense is None or len(self._dense) != self.num_chunks:  # removals were forgotten meanwhile
                self._open_parts()

    def _allowed(self, where: Condition | None) -> list[int] | None:
        """Keys that meet a condition; both kinds of search ask, one query is enough."""
        if where is None:
            return None
        key = (self._version, where)
        known = self._matching
        if known is None or known[0] != key:
            known = self._matching = (key, self._truth.matching(where))
        return known[1]

    def _agree_on_dim(self, entries: Sequence[Entry]) -> None:
        dims = {entry.vectors.shape[1] for entry in entries if len(entry.vectors)}
        dims |= {self.dim} - {None}
        if len(dims) > 1:
            raise RetrievalError(
                f"vectors of {' and '.join(map(str, sorted(filter(None, dims))))} dimensions cannot be in one "
                "collection; embed with the model it was made with"
            )
        if dims and self.dim is None:
            self._truth.set_facts({"dim": dims.pop(), "seed": self._seed})

    def _require_writable(self) -> None:
        if not self.is_writable:
            raise StorageError(f"{self.folder} cannot be changed: it is open for reading only")

    def _give_free(self) -> None:
        for name in ("_sparse", "_truth"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        if self._folder_lock is not None:
            self._folder_lock.release()
            self._folder_lock = None
