"""The collections on one Milvus, by tenant: shared by all processes that have its address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarn.errors import CollectionNotFound
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.extras import require
from kvarn.retrieval.ingest.chunking import Chunking
from kvarn.retrieval.milvus.connection import MilvusConnection
from kvarn.retrieval.milvus.index import WAIT_S, MilvusIndex
from kvarn.retrieval.milvus.names import chunks_name, names_among

if TYPE_CHECKING:
    from kvarn.retrieval.embedder import Model


class MilvusStorage:
    """A CollectionStorage. uri: http://host:19530, or with /database; token: as Milvus gives it."""

    def __init__(self, uri: str, token: str = "", *, wait_s: float | None = None) -> None:
        """wait_s: for another process that changes a collection, before CollectionLocked."""
        require("pymilvus", "milvus")
        self._connection = MilvusConnection(uri, token)
        self._wait_s = WAIT_S if wait_s is None else wait_s

    def names(self, tenant: str = "") -> Sequence[str]:
        return names_among(self._connection.list_collections(), tenant)

    def require(self, name: str, tenant: str = "") -> None:
        chunks_name(name, tenant)
        names = self.names(tenant)
        if name not in names:
            known = ", ".join(names) or "none yet"
            raise CollectionNotFound(f"there is no collection {name!r} on {self._connection.uri}; there are: {known}")

    def open(self, name: str, tenant: str = "", *, model: Model = None, chunking: Chunking | None = None) -> Collection:
        return Collection(name, model=model, index=self._index(name, tenant), chunking=chunking)

    def open_to_search(self, name: str, tenant: str = "", *, model: Model = None) -> Collection:
        self.require(name, tenant)
        return Collection(name, model=model, index=self._index(name, tenant))

    def drop(self, name: str, tenant: str = "") -> None:
        self.require(name, tenant)
        self._index(name, tenant).drop()

    def num_bytes(self, tenant: str = "") -> int:
        """Of the texts, words, metadata and vectors of all rows; Milvus's indexes come on top."""
        return sum(self._index(name, tenant).num_bytes for name in self.names(tenant))

    def _index(self, name: str, tenant: str) -> MilvusIndex:
        return MilvusIndex(self._connection, name, tenant=tenant, wait_s=self._wait_s)
