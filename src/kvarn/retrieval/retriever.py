"""The one contract of everything that stores chunks and finds them: embedded by default, Milvus for many machines.

Fusion, re-ordering and texts for people are made above it, so that every store gives the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvarn.retrieval.filters import Condition
from kvarn.retrieval.types import ChunkRecord, Float32, Scored, StoredChunk


class Retriever(Protocol):
    """Documents as chunks with vectors. Searches may come from several threads, changes from one at a time."""

    @property
    def version(self) -> int:
        """Grows with every change: what was found at one version may be kept as long as it stays."""

    @property
    def num_chunks(self) -> int: ...

    @property
    def dim(self) -> int | None:
        """Length of the vectors; None before the first."""

    def put(self, entries: Sequence[ChunkRecord]) -> None:
        """Add or replace documents: after a crash all of them are there, or none."""

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""

    def dense(self, vector: Float32, k: int, where: Condition | None) -> list[Scored]:
        """The k chunks nearest by cosine, best first; k of them if that many meet the condition."""

    def sparse(self, query: str, k: int, where: Condition | None) -> list[Scored]:
        """The k best chunks by BM25 that share a term with the query."""

    def chunks(self, keys: Sequence[int]) -> Mapping[int, StoredChunk]:
        """Chunks by key; those that are gone are left out."""

    def vectors(self, keys: Sequence[int]) -> Mapping[int, Float32]:
        """Vectors by key."""

    def digests(self, document_ids: Sequence[str]) -> Mapping[str, bytes]:
        """Content hashes of the documents that are there."""

    def owners(self, digests: Sequence[bytes]) -> Mapping[bytes, str]:
        """Which document has a content hash."""

    def ids_from(self, source: str) -> list[str]:
        """Documents of a source, or of a folder of sources."""

    def documents(self) -> list[dict[str, Any]]:
        """id, source, metadata and number of chunks of every document."""

    def fact(self, name: str, default: Any = None) -> Any:
        """A value about the whole collection."""

    def set_facts(self, facts: Mapping[str, Any]) -> None: ...

    def optimise(self) -> None:
        """Leave no trace of what was removed."""

    def close(self) -> None: ...
