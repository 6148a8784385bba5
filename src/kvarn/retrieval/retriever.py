"""The contract of everything that stores chunks and finds them: embedded by default, Milvus for many machines.

Storage and search are apart: a ChunkStore reads what is stored, a Retriever changes it and searches. Fusion, reranking
and hits are made above both, so that every implementation gives the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from kvarn.retrieval.filters import Condition
from kvarn.retrieval.scores import ChunkCandidates, Keys, Scales, Scores
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

    def files_below(self, folder: str) -> Mapping[str, bytes]:
        """Content hashes of the documents that are files below a folder: their id is their source."""

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
    def folder(self) -> Path | None:
        """Where its files are; None if they are on another machine."""

    @property
    def is_writable(self) -> bool:
        """Whether it was opened to be changed."""

    @property
    def version(self) -> int:
        """Grows with every change: results of one version stay valid as long as it does."""

    @property
    def num_chunks(self) -> int: ...

    @property
    def language(self) -> str:
        """The language whose stop words and stems its words have."""

    @property
    def dim(self) -> int | None:
        """Length of the vectors; None before the first."""

    def writing(self) -> AbstractContextManager[None]:
        """While the block runs no other process changes what is stored."""

    def put(self, documents: Sequence[EmbeddedDocument]) -> None:
        """Add or replace documents: after a crash all of them are there, or none."""

    def bulk(self) -> AbstractContextManager[None]:
        """While documents are changed in many parts; what is put is found at the latest on leaving."""

    def rename(self, moves: Mapping[str, str]) -> Mapping[str, str]:
        """Give documents new ids and sources, all or none, and remove those that had them; returns what was done."""

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""

    def dense(self, vector: Float32, k: int, where: Condition | None) -> list[Scored]:
        """The k nearest chunks by cosine, best first; always k if that many meet the condition."""

    def sparse(self, query: str, k: int, where: Condition | None) -> list[Scored]:
        """The k best chunks by BM25 that share a term with the query; a quoted phrase adds to the score."""

    def candidates(self, query: str, vector: Float32, depth: int, where: Condition | None) -> ChunkCandidates:
        """The chunks that are among the best by meaning or by words, as many of each."""

    def cosines(self, vector: Float32, keys: Keys) -> Scores:
        """Cosines of the given chunks, as candidates has them; those that are not there any more are left out."""

    def bm25(self, query: str, keys: Keys) -> Scores:
        """BM25 of the given chunks; those that share no term with the query are left out."""

    def scales(self, query: str, vector: Float32) -> Scales:
        """What the scores of a query are measured by; depends on the query and the collection only."""

    def document_frequencies(self, terms: Sequence[str]) -> Mapping[str, int]:
        """How many chunks have each of some terms; empty where that cannot be told."""

    def optimise(self) -> None:
        """Remove what deleted documents have left in the indexes."""

    def close(self) -> None: ...
