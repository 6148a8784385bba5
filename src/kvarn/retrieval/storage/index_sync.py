"""The HNSW graph and the BM25 index of one folder: loaded, brought up to the document store's version, rebuilt, saved.

Files that the manifest names and whose digests match are loaded; later changes of the store are applied to them. The
manifest is written last. Knows the store's versions; knows no queries.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvarn.errors import StorageError
from kvarn.retrieval.storage.bm25 import SparseIndex, is_outdated
from kvarn.retrieval.storage.document_store import DocumentStore
from kvarn.retrieval.storage.folder import file_digest, file_digests, is_intact
from kvarn.retrieval.storage.hnsw import DenseIndex
from kvarn.retrieval.storage.manifest import CheckpointManifest, read_manifest, write_manifest
from kvarn.retrieval.text_analysis import DEFAULT_LANGUAGE, detect_language

CATCH_UP_BATCH = 1024  # chunks read from the store at a time
MIN_CHECKPOINT_CHUNKS = 2048  # changed chunks before a checkpoint ...
CHECKPOINT_SHARE = 0.25  # ... and their share of all chunks; while many are added in one go
BULK_CHECKPOINT_SHARE = 0.5
QUICK_CHUNKS = 20_000  # a BM25 index of so many is rebuilt for every removed chunk that is in its statistics ...
REMOVED_SHARE = 0.05  # ... and a larger one when so many of its chunks are removed ones
LANGUAGE_SAMPLE = 256  # chunks
DAMAGED = "an index in %s is damaged, and made anew from the documents: %s"
CHANGED = "its files are not those that were saved"
log = logging.getLogger("kvarn.retrieval")


class IndexSync:
    """Keeps both indexes in sync with a document store. For one thread at a time, except for searches."""

    def __init__(self, folder: Path, store: DocumentStore, seed: int, *, is_writable: bool) -> None:
        self.folder = folder
        self.is_writable = is_writable
        self.dense: DenseIndex | None = None
        self.sparse: SparseIndex
        self.version = 0  # of the store, which both indexes have reached
        self._store = store
        self._seed = seed
        self._num_changed = 0  # chunks, since the last checkpoint
        self._saved_version: int | None = None  # of the files that the manifest names
        self._is_replay = True  # whether the BM25 index may be ahead of the version it is known to have reached
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def catch_up(self, version: int, *, in_bulk: bool = False) -> None:
        """Bring both indexes to a version that the store has just reached; write a checkpoint if it is due."""
        self._num_changed += len(self._store.changed_since(self.version)[0]) + 1
        self.version = version
        self._catch_up_dense(version)  # each from its own version: one that failed the last time catches up
        self._catch_up_sparse(version)
        share = BULK_CHECKPOINT_SHARE if in_bulk else CHECKPOINT_SHARE
        if self._num_changed > MIN_CHECKPOINT_CHUNKS and self._num_changed > share * self._store.num_chunks:
            self._checkpoint()

    @property
    def is_behind(self) -> bool:
        """Whether the BM25 index could not be written the last time."""
        return self._sparse_version < self.version and self.is_writable

    def refresh(self, version: int) -> None:
        """In a process that only reads: see what the writing one has committed."""
        self._catch_up_dense(version)
        self.sparse.language = self._language
        self.version = version
        is_reloaded = self._reload_sparse()
        if not is_reloaded or self.dense is None or len(self.dense) != self._store.num_chunks:
            replaced = self.sparse
            self._open()  # the BM25 index is another one, or the store has dropped some removals
            replaced.close()

    def rebuild(self) -> None:
        """Rebuild both indexes from the store, without what removed documents have left."""
        self._require_writable()
        self._detect_language()
        self._rebuild_sparse()
        self._rebuild_dense()
        self._checkpoint()

    def drop_removed(self) -> None:
        """Make removed chunks no longer count in BM25's statistics, if there are any and that is quick or worth it."""
        num_removed, num_chunks = self.sparse.num_removed, self._store.num_chunks
        if not num_removed:
            self.sparse.reload()  # a merge may have dropped them since the last change, and searches not know it yet
        if self.is_behind or not num_removed or num_chunks > max(QUICK_CHUNKS, num_removed / REMOVED_SHARE):
            return
        fresh = self._new_sparse()
        try:
            fresh.change(self._texts(self._store.changed_since(0)[0]), (), is_replay=False)
        except BaseException:  # a full disk: the old one goes on
            fresh.close()
            shutil.rmtree(fresh.folder, ignore_errors=True)
            raise
        old, self.sparse = self.sparse, fresh
        old.close()
        self._checkpoint()

    def save(self) -> None:
        """Write a checkpoint, if something has changed since the last and this process may write."""
        if self.is_writable and self._saved_version != self.version:
            self._checkpoint()

    def close(self) -> None:
        if hasattr(self, "sparse"):  # missing if it could not be opened
            self.sparse.close()

    def _open(self) -> None:
        """Load what is intact and bring it to the store's version; in a writing process, rebuild the rest."""
        self.version = self._store.version
        manifest = read_manifest(self.folder) or CheckpointManifest()
        if self.version < manifest.version:  # the store is written first, so it is another, or an empty one
            raise StorageError(
                f"{self.folder} has lost documents: its store is at version {self.version}, its indexes were made from "
                f"version {manifest.version}; restore the store from a copy, or drop the collection and add them again"
            )
        self._dense_version = self._load_dense(manifest)
        self._sparse_version = self._load_sparse(manifest)
        if self.is_writable:
            self._catch_up_or_rebuild_sparse()
            if len(self.sparse) != self._store.num_chunks:
                log.warning(DAMAGED, self.folder, f"it has {len(self.sparse):,} chunks, not {self._store.num_chunks:,}")
                self._rebuild_sparse()
        self._catch_up_dense(self.version)
        if self.is_writable and self.dense is not None and len(self.dense) != self._store.num_chunks:
            self._rebuild_dense()
        is_as_saved = manifest.sparse in ("", self.sparse.folder.name)  # else it is made anew at every start
        self._saved_version = manifest.version if is_as_saved else None
        self._num_changed = self.version - manifest.version
        self.save()

    def _reload_sparse(self) -> bool:
        """Whether the BM25 index is still the one that the writing process uses: a rebuilt one has another folder."""
        manifest = read_manifest(self.folder)
        if manifest is None or manifest.sparse not in ("", self.sparse.folder.name):
            return False
        try:
            self.sparse.reload()
        except ValueError:  # replaced in this moment
            return False
        return True

    def _load_dense(self, manifest: CheckpointManifest) -> int:
        """Load the graph if it is intact; returns its version, 0 for an empty one."""
        self.dense = self._new_dense()
        if self.dense is None:
            return 0
        path = self.folder / manifest.dense
        try:
            if manifest.dense and file_digest(path) == manifest.dense_digest:
                self.dense.load(path)
                return manifest.version
            if manifest.dense:
                log.warning(DAMAGED, self.folder, CHANGED)
        except (OSError, ValueError, RuntimeError) as error:
            log.warning(DAMAGED, self.folder, error)
            self.dense = self._new_dense()
        return 0

    def _load_sparse(self, manifest: CheckpointManifest) -> int:
        """Open the BM25 index if it is intact; returns a version it has at least reached, 0 for an empty one."""
        folder = self.folder / (manifest.sparse or "sparse-0")
        if self.is_writable and is_outdated(folder):
            log.info("the BM25 index in %s is of an earlier version, and made anew from the documents", self.folder)
        elif folder.exists() and is_intact(folder, manifest.sparse_files):
            try:
                self.sparse = SparseIndex(folder, is_writable=self.is_writable, language=self._language)
                len(self.sparse)
                return manifest.version
            except (ValueError, OSError) as error:
                log.warning(DAMAGED, self.folder, error)
        elif manifest.sparse:
            log.warning(DAMAGED, self.folder, CHANGED)
        self._require_writable()
        self.sparse = self._new_sparse()
        return 0

    def _new_dense(self) -> DenseIndex | None:
        """An empty graph; None until the length of the vectors is known."""
        dim = self._store.meta("dim")
        return None if dim is None else DenseIndex(int(dim), self._seed, self._store.vectors)

    def _new_sparse(self) -> SparseIndex:
        """An empty index in a folder that was not used before."""
        numbers = [int(path.name.removeprefix("sparse-")) for path in self.folder.glob("sparse-*")]
        folder = self.folder / f"sparse-{max(numbers, default=-1) + 1}"
        try:
            return SparseIndex(folder, is_writable=True, language=self._language)
        except ValueError as error:  # tantivy raises it for everything, including a full disk
            raise StorageError(f"{folder}: {error}; check the disk and try again") from error

    @property
    def _language(self) -> str:
        """Of the documents; of a collection made before it was stored, English."""
        return str(self._store.meta("language", DEFAULT_LANGUAGE))

    def _detect_language(self) -> None:
        """Store the language of a sample of the texts; the BM25 index has to be rebuilt if it is another."""
        keys, _ = self._store.changed_since(0)
        sample = keys[:: max(1, len(keys) // LANGUAGE_SAMPLE)]
        texts = [stored.chunk.text for _, stored in sorted(self._store.chunks(sample).items())]
        self._store.set_meta({"language": detect_language(texts)})

    def _catch_up_sparse(self, version: int) -> None:
        """Bring the BM25 index to a version of the store; idempotent."""
        added, removed = self._store.changed_since(self._sparse_version)
        if added and self._store.meta("language") is None and not len(self.sparse):
            self._detect_language()
            self.sparse.language = self._language
        if added or removed:
            is_replay, self._is_replay = self._is_replay, True  # should this fail, it may be half done
            self.sparse.change(self._texts(added), removed, is_replay=is_replay)
        self._sparse_version = version
        self._is_replay = False

    def _catch_up_or_rebuild_sparse(self) -> None:
        """A process that was killed may have left a file that the index's next change must not meet."""
        try:
            self._catch_up_sparse(self.version)
        except StorageError as error:
            log.warning(DAMAGED, self.folder, error)
            self._rebuild_sparse()

    def _texts(self, keys: list[int]) -> Iterator[tuple[int, str]]:
        """Keys and texts of chunks, a few of them in memory at a time."""
        for start in range(0, len(keys), CATCH_UP_BATCH):
            chunks = self._store.chunks(keys[start : start + CATCH_UP_BATCH])
            yield from ((key, stored.chunk.named(stored.source)) for key, stored in sorted(chunks.items()))

    def _catch_up_dense(self, version: int) -> None:
        """Bring the graph to a version of the store."""
        if self.dense is None:
            self.dense = self._new_dense()
        if self.dense is not None:
            added, removed = self._store.changed_since(self._dense_version)
            self.dense.remove(removed)
            for start in range(0, len(added), CATCH_UP_BATCH):
                vectors = self._store.vectors(added[start : start + CATCH_UP_BATCH])
                keys = sorted(vectors)
                self.dense.add(keys, np.array([vectors[key] for key in keys], np.float32))
        self._dense_version = version

    def _rebuild_sparse(self) -> None:
        old, self.sparse = self.sparse, self._new_sparse()
        old.close()
        self._sparse_version, self._is_replay = 0, False
        self._catch_up_sparse(self.version)

    def _rebuild_dense(self) -> None:
        self.dense, self._dense_version = self._new_dense(), 0
        self._catch_up_dense(self.version)

    def _checkpoint(self) -> None:
        """Save the graph, write the manifest, then remove the files that it no longer names."""
        name = f"dense-{self.version}.usearch" if self.dense is not None else ""
        if self.dense is not None:
            self.dense.save(self.folder / name)
        digest = file_digest(self.folder / name) if name else ""
        sparse = self.sparse.folder
        write_manifest(self.folder, CheckpointManifest(self.version, name, digest, sparse.name, file_digests(sparse)))
        self._store.forget_removed(self.version)
        self._saved_version, self._num_changed = self.version, 0
        for path in self.folder.glob("dense-*"):
            if path.name != name:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("sparse-*"):
            if path != sparse:
                shutil.rmtree(path, ignore_errors=True)

    def _require_writable(self) -> None:
        if not self.is_writable:
            raise StorageError(f"{self.folder} cannot be changed: it is open for reading only")
