"""Documents and queries to vectors: cut, embedded, stored once. Joins an index and an embedding model.

Refuses a model that embeds otherwise than the one the collection was made with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvarn.errors import InvalidParameter, RetrievalError
from kvarn.retrieval.embedder import MIN_LIKENESS, PROBE, Embedder
from kvarn.retrieval.ingest.chunking import Chunking, cut
from kvarn.retrieval.types import AddReport, ChunkRecord, Document, Float32

if TYPE_CHECKING:
    from kvarn.retrieval.retriever import Retriever


class Indexer:
    """Fills one index with the vectors of one model."""

    def __init__(self, index: Retriever, name: str) -> None:
        """name: of the collection, for error messages."""
        self._index = index
        self._name = name
        self._is_same_model = False  # whether the embedding model was compared with the index's

    def add(self, batch: Sequence[Document], chunking: Chunking, embedder: Embedder) -> AddReport:
        """Store what is new or changed of a batch, equal content once; all of it or nothing."""
        known = self._index.digests([document.key for document in batch])
        fresh = [document for document in batch if known.get(document.key) != document.digest]
        owners = dict(self._index.owners([document.digest for document in fresh]))
        entries, duplicates = [], {}
        for document in fresh:
            owner = owners.setdefault(document.digest, document.key)
            if owner != document.key:
                duplicates[document.key] = owner
            else:
                entries.append(document)
        num_chunks = self._put(entries, chunking, embedder)
        num_updated = sum(document.key in known for document in entries)
        return AddReport(
            added=len(entries) - num_updated,
            updated=num_updated,
            unchanged=len(batch) - len(fresh),
            chunks=num_chunks,
            duplicates=duplicates,
        )

    def embed_queries(self, texts: Sequence[str], embedder: Embedder) -> Float32:
        """One unit vector per query; a query too long for the model is the mean of its parts."""
        self._require_same_model(embedder)
        chunking = Chunking(embedder.max_tokens, 0)
        parts = [cut(Document(text), chunking, embedder.count) for text in texts]
        vectors = embedder.embed([piece.text for pieces in parts for piece in pieces])
        sizes = np.cumsum([0, *map(len, parts)])
        means = [vectors[a:b].mean(axis=0) for a, b in itertools.pairwise(sizes)]
        return np.asarray([mean / max(float(np.linalg.norm(mean)), 1e-12) for mean in means], np.float32)

    def _put(self, documents: Sequence[Document], chunking: Chunking, embedder: Embedder) -> int:
        if not documents:
            return 0
        self._require_same_model(embedder)
        _require_fitting(chunking, embedder.max_tokens)
        cuts = [cut(document, chunking, embedder.count) for document in documents]
        vectors = embedder.embed([piece.searchable for pieces in cuts for piece in pieces])
        entries, start = [], 0
        for document, pieces in zip(documents, cuts, strict=True):
            part = vectors[start : start + len(pieces)]
            start += len(pieces)
            entries.append(ChunkRecord(document.key, document.source, document.digest, document.metadata, pieces, part))
        self._index.put(entries)
        return start

    def _require_same_model(self, embedder: Embedder) -> None:
        """Store what the first model makes of a fixed sentence; refuse a model that differs."""
        if self._is_same_model:
            return
        mine = embedder.embed([PROBE])[0]
        blob = self._index.fact("probe")
        if blob is None:
            self._index.set_facts({"probe": mine.tobytes(), "model": embedder.name})
        else:
            theirs = np.frombuffer(blob, np.float32)
            if theirs.shape != mine.shape or float(theirs @ mine) < MIN_LIKENESS:
                raise RetrievalError(
                    f"collection {self._name!r} was made with the embedding model {self._index.fact('model')!r} "
                    f"({len(theirs)} dimensions), not {embedder.name!r} ({len(mine)}); open it with that one, "
                    "or index the documents again"
                )
        self._is_same_model = True


def _require_fitting(chunking: Chunking, max_tokens: int) -> None:
    if chunking.tokens > max_tokens:
        raise InvalidParameter(f"chunks of {chunking.tokens} tokens were asked for, the model embeds {max_tokens}")
