"""The contract of everything that stores chunks and finds them: embedded by default, Milvus for many machines.

Storage and search are apart: a ChunkStore reads what is stored, a Retriever changes it and searches. Fusion, reranking
and hits are made above both, so that every implementation gives the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvarn.retrieval.filters import Condition
from kvarn.retrieval.types import EmbeddedDocument, Float32, Scored, StoredChunk


class ChunkStore(Protocol):
    """Documents, their chunks, and values about the whole collection. May be read from several threads."""

    def chunks(self, keys: Sequence[int]) -> Mapping[int, StoredChunk]:
        """Chunks by key; removed ones are left out."""

    def vectors(self, keys: Sequence[int]) -> Mapping[int, Float32]:
        """Vectors by key of their chunk."""

    def digests(self, document_ids: Sequence[str]) -> Mapping[str, bytes]:
        """Content hashes of those documents that are stored."""

    def owners(self, digests: Sequence[bytes]) -> Mapping[bytes, str]:
        """Ids of the documents that have these content hashes."""

    def ids_from(self, source: str) -> list[str]:
        """Ids of the documents of a file, or of all files below a folder."""

    def documents(self) -> list[dict[str, Any]]:
        """id, source, metadata and number of chunks of every document."""

    def meta(self, name: str, default: Any = None) -> Any:
        """A value about the whole collection, such as the length of its vectors."""

    def set_meta(self, values: Mapping[str, Any]) -> None: ...


class Retriever(Protocol):
    """An index of chunks with vectors. Searches may come from several threads, changes from one at a time."""

    @property
    def store(self) -> ChunkStore: ...

    @property
    def is_writable(self) -> bool:
        """Whether it was opened to be changed."""

    @property
    def version(self) -> int:
        """Grows with every change: results of one version stay valid as long as it does."""

    @property
    def num_chunks(self) -> int: ...

    @property
    def dim(self) -> int | None:
        """Length of the vectors; None before the first."""

    def put(self, documents: Sequence[EmbeddedDocument]) -> None:
        """Add or replace documents: after a crash all of them are there, or none."""

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""

    def dense(self, vector: Float32, k: int, where: Condition | None) -> list[Scored]:
        """The k nearest chunks by cosine, best first; always k if that many meet the condition."""

    def sparse(self, query: str, k: int, where: Condition | None) -> list[Scored]:
        """The k best chunks by BM25 that share a term with the query."""

    def optimise(self) -> None:
        """Remove what deleted documents have left in the indexes."""

    def close(self) -> None: ...
