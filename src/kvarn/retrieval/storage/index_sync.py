"""The HNSW graph and the BM25 index of one folder: loaded, brought up to the truth, made again, saved.

What the manifest names and its digests confirm is loaded; the truth's changes since then are added. The manifest is
written last. Knows the truth's versions; knows no queries.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from kvarn.errors import StorageError
from kvarn.retrieval.storage.bm25 import SparseIndex
from kvarn.retrieval.storage.document_store import DocumentStore
from kvarn.retrieval.storage.folder import file_digests, is_intact
from kvarn.retrieval.storage.hnsw import DenseIndex, file_digest
from kvarn.retrieval.storage.manifest import CheckpointManifest, read_manifest, write_manifest

CATCH_UP = 1024  # chunks read from the truth at a time
CHECKPOINT = 2048  # changed chunks; at least, see bring
CHECKPOINT_SHARE = 0.25


class IndexSync:
    """Both indexes beside a truth. For one thread at a time, but for searches in them."""

    def __init__(self, folder: Path, truth: DocumentStore, seed: int, *, is_writable: bool) -> None:
        self.folder = folder
        self.is_writable = is_writable
        self.dense: DenseIndex | None = None
        self.sparse: SparseIndex
        self._truth = truth
        self._seed = seed
        try:
            self.reopen()
        except BaseException:
            self.close()
            raise

    def reopen(self) -> None:
        """Load what is whole and bring it to the truth's version; in a writing process, make again what is not."""
        self.version = self._truth.version
        manifest = read_manifest(self.folder) or CheckpointManifest()
        self._dense_version = self._load_dense(manifest)
        self._sparse_version = self._load_sparse(manifest)
        if self.is_writable:
            self._bring_sparse(self.version)
            self._verify_sparse()
        self._bring_dense(self.version)
        if self.is_writable and self.dense is not None and len(self.dense) != self._truth.num_chunks:
            self._rebuild_dense()
        self._saved = manifest.version
        self._changed = self.version - manifest.version
        self.save()

    def bring(self, version: int) -> None:
        """Bring both indexes to a version that the truth has just reached; save them now and then."""
        self._changed += len(self._truth.changed_since(self.version)[0]) + 1
        self.version = version
        self._bring_sparse(version)  # from where each stands: one that failed the last time catches up
        self._bring_dense(version)
        if self._changed > CHECKPOINT and self._changed > CHECKPOINT_SHARE * self._truth.num_chunks:
            self._checkpoint()

    def follow(self, version: int) -> None:
        """In a process that only reads: see what the writing one has committed."""
        self._bring_dense(version)
        self.sparse.reload()
        self.version = version
        if self.dense is None or len(self.dense) != self._truth.num_chunks:  # removals were forgotten meanwhile
            self.reopen()

    def rebuild(self) -> None:
        """Make both anew from the truth, as if nothing had ever been removed."""
        self._require_writable()
        self._rebuild_sparse()
        self._rebuild_dense()
        self._checkpoint()

    def save(self) -> None:
        """Save the graph and write the manifest, if there is something to save and we may."""
        if self.is_writable and self._saved != self.version:
            self._checkpoint()

    def close(self) -> None:
        if hasattr(self, "sparse"):  # it is not there if it could not be opened
            self.sparse.close()

    def _load_dense(self, manifest: CheckpointManifest) -> int:
        """Load the graph if it is whole; the version it stands for."""
        self.dense = self._new_dense()
        if self.dense is None:
            return 0
        path = self.folder / manifest.dense
        try:
            if manifest.dense and file_digest(path) == manifest.dense_digest:
                self.dense.load(path)
                return manifest.version
        except (OSError, ValueError, RuntimeError):
            self.dense = self._new_dense()
        return 0

    def _load_sparse(self, manifest: CheckpointManifest) -> int:
        """Open the BM25 index if it is whole; the version it is at least at."""
        folder = self.folder / (manifest.sparse or "sparse-0")
        if folder.exists() and is_intact(folder, manifest.sparse_files):
            try:
                self.sparse = SparseIndex(folder, is_writable=self.is_writable)
                len(self.sparse)
            except (ValueError, OSError):
                pass  # damaged: built anew from the truth, below
            else:
                return manifest.version
        self._require_writable()
        self.sparse = self._new_sparse()
        return 0

    def _new_dense(self) -> DenseIndex | None:
        """An empty graph; None as long as nobody knows the length of vectors."""
        dim = self._truth.fact("dim")
        return None if dim is None else DenseIndex(int(dim), self._seed, self._truth.vectors)

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
                self.sparse.change(texts, gone)
        self._sparse_version = version

    def _verify_sparse(self) -> None:
        if len(self.sparse) != self._truth.num_chunks:
            self._rebuild_sparse()

    def _rebuild_sparse(self) -> None:
        old, self.sparse = self.sparse, self._new_sparse()
        old.close()
        self._sparse_version = 0
        self._bring_sparse(self.version)

    def _rebuild_dense(self) -> None:
        self.dense, self._dense_version = self._new_dense(), 0
        self._bring_dense(self.version)

    def _bring_dense(self, version: int) -> None:
        """Bring the graph to a version of the truth."""
        if self.dense is None:
            self.dense = self._new_dense()
        if self.dense is not None:
            added, removed = self._truth.changed_since(self._dense_version)
            self.dense.remove(removed)
            for start in range(0, len(added), CATCH_UP):
                vectors = self._truth.vectors(added[start : start + CATCH_UP])
                keys = sorted(vectors)
                self.dense.add(keys, np.array([vectors[key] for key in keys], np.float32))
        self._dense_version = version

    def _checkpoint(self) -> None:
        """Save the graph, write the manifest, then remove what it no longer names."""
        name = f"dense-{self.version}.usearch" if self.dense is not None else ""
        if self.dense is not None:
            self.dense.save(self.folder / name)
        digest = file_digest(self.folder / name) if name else ""
        sparse = self.sparse.folder
        write_manifest(self.folder, CheckpointManifest(self.version, name, digest, sparse.name, file_digests(sparse)))
        self._truth.forget_removed(self.version)
        self._saved, self._changed = self.version, 0
        for path in self.folder.glob("dense-*"):
            if path.name != name:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("sparse-*"):
            if path != sparse:
                shutil.rmtree(path, ignore_errors=True)

    def _require_writable(self) -> None:
        if not self.is_writable:
            raise StorageError(f"{self.folder} cannot be changed: it is open for reading only")
