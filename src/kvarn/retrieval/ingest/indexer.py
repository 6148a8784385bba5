"""Documents and queries to vectors: split, embedded, stored once. Joins an index and an embedding model.

Refuses a model that embeds differently from the one the collection was made with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvarn.errors import InvalidParameter, RetrievalError
from kvarn.retrieval.embedder import Embedder, Role, embed_as
from kvarn.retrieval.ingest.addition import Addition, Digested
from kvarn.retrieval.ingest.chunking import Chunking, split
from kvarn.retrieval.types import AddReport, Document, EmbeddedDocument, Float32

if TYPE_CHECKING:
    from kvarn.retrieval.retriever import ChunkStore, Retriever

PROBE = "The mill turns grain into flour, and questions into answers."  # embedded to tell two models apart
_NO_LOCK = nullcontext()
MIN_PROBE_COSINE = 0.995  # another quantisation of the same model stays above


class Indexer:
    """Embeds for one index, and adds documents to it."""

    def __init__(self, index: Retriever, name: str) -> None:
        """name: of the collection, for error messages."""
        self._index = index
        self._name = name
        self._is_same_model = False  # whether the embedding model was compared with the index's
        self._has_prompts = False  # whether queries and documents are embedded behind prompts of their own

    def addition(
        self, chunking: Chunking, embedder: Embedder, lock: AbstractContextManager[object] = _NO_LOCK
    ) -> Addition:
        """Begin to add documents; lock: held while they are stored."""
        return Addition(self._index, partial(self._embedded, chunking, embedder), lock)

    def add(self, batch: Sequence[Document], chunking: Chunking, embedder: Embedder) -> AddReport:
        """Store the new and changed documents of a batch, equal content once; all of them or none."""
        addition = self.addition(chunking, embedder)
        addition.embed(batch)
        return addition.commit()

    def embed_queries(self, texts: Sequence[str], embedder: Embedder) -> Float32:
        """One unit vector per query; of a query too long for the model, the mean of its parts."""
        self._require_same_model(embedder)
        chunking = Chunking(embedder.max_tokens, 0)
        parts = [split(Document(text), chunking, embedder.count) for text in texts]
        vectors = embed_as(embedder, [part.text for one in parts for part in one], self._role("query"))
        bounds = np.cumsum([0, *map(len, parts)])
        means = [vectors[start:end].mean(axis=0) for start, end in itertools.pairwise(bounds)]
        return np.asarray([mean / max(float(np.linalg.norm(mean)), 1e-12) for mean in means], np.float32)

    def _embedded(
        self, chunking: Chunking, embedder: Embedder, documents: Sequence[Digested]
    ) -> list[EmbeddedDocument]:
        self._require_same_model(embedder)
        _require_fitting(chunking, embedder.max_tokens)
        chunks = [split(one.document, chunking, embedder.count) for one in documents]
        vectors = embed_as(embedder, [chunk.searchable for one in chunks for chunk in one], self._role("document"))
        embedded, start = [], 0
        for one, own in zip(documents, chunks, strict=True):
            end = start + len(own)
            fields = (one.key, one.document.source, one.digest, one.document.metadata)
            embedded.append(EmbeddedDocument(*fields, own, vectors[start:end]))
            start = end
        return embedded

    def _require_same_model(self, embedder: Embedder) -> None:
        """Store what the first model makes of a fixed sentence; refuse a model that differs."""
        if self._is_same_model:
            return
        store = self._index.store
        mine = embedder.embed([PROBE])[0]
        stored = store.meta("probe")
        if stored is None:
            store.set_meta({"probe": mine.tobytes(), "model": embedder.name, "has_prompts": 1})
        else:
            theirs = np.frombuffer(stored, np.float32)
            if theirs.shape != mine.shape or float(theirs @ mine) < MIN_PROBE_COSINE:
                raise RetrievalError(
                    f"collection {self._name!r} was made with the embedding model {store.meta('model')!r} "
                    f"({len(theirs)} dimensions), not {embedder.name!r} ({len(mine)}); open it with that one, "
                    "or index the documents again"
                )
        self._has_prompts = bool(store.meta("has_prompts", 0))
        self._is_same_model = True

    def _role(self, role: Role) -> Role | None:
        """None in a collection made before roles were told apart: all of its texts are behind the default prompt."""
        return role if self._has_prompts else None


def chunking_of(store: ChunkStore, requested: Chunking | None) -> Chunking:
    """The requested chunking, which is stored; without one, the stored chunking."""
    tokens, overlap = store.meta("chunk_tokens"), store.meta("chunk_overlap")
    if requested is None:
        return Chunking() if tokens is None else Chunking(int(tokens), int(overlap))
    if (requested.tokens, requested.overlap) != (tokens, overlap):
        store.set_meta({"chunk_tokens": requested.tokens, "chunk_overlap": requested.overlap})
    return requested


def _require_fitting(chunking: Chunking, max_tokens: int) -> None:
    if chunking.tokens > max_tokens:
        raise InvalidParameter(
            f"chunks of {chunking.tokens} tokens were asked for, the model embeds {max_tokens}", field="chunk_tokens"
        )
