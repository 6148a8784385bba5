"""Where collections are kept: in folders of this machine, or on a Milvus that several processes share.

One storage holds the collections of all tenants. Knows names; what is in a collection is known to collection.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvarn.config import milvus_token
from kvarn.errors import StorageError
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.ingest.chunking import Chunking
from kvarn.retrieval.storage import paths

if TYPE_CHECKING:
    from kvarn.retrieval.embedder import Model
    from kvarn.retrieval.milvus.collections import MilvusStorage

log = logging.getLogger("kvarn.retrieval")


class CollectionStorage(Protocol):
    """The collections of every tenant; "" is the shared one of this machine's commands."""

    def names(self, tenant: str = "") -> Sequence[str]: ...

    def require(self, name: str, tenant: str = "") -> None:
        """CollectionNotFound unless there is one of this name."""

    def open(self, name: str, tenant: str = "", *, model: Model = None, chunking: Chunking | None = None) -> Collection:
        """Open a collection to change it, or create it with this chunking."""

    def open_to_search(self, name: str, tenant: str = "", *, model: Model = None) -> Collection:
        """Open one that exists, whether or not another process is changing it."""

    def drop(self, name: str, tenant: str = "") -> None:
        """Remove a collection with everything in it."""

    def num_bytes(self, tenant: str = "") -> int:
        """What all collections of a tenant hold."""


class FolderStorage:
    """Collections in folders of Kvarn's home: one process may change each, on this machine."""

    def names(self, tenant: str = "") -> Sequence[str]:
        return paths.list_names(paths.tenant_folder(tenant))

    def require(self, name: str, tenant: str = "") -> None:
        paths.existing_folder(name, paths.tenant_folder(tenant))

    def open(self, name: str, tenant: str = "", *, model: Model = None, chunking: Chunking | None = None) -> Collection:
        return Collection(name, model=model, folder=paths.tenant_folder(tenant), chunking=chunking)

    def open_to_search(self, name: str, tenant: str = "", *, model: Model = None) -> Collection:
        return Collection.open(name, model=model, folder=paths.tenant_folder(tenant))

    def drop(self, name: str, tenant: str = "") -> None:
        paths.drop(name, paths.tenant_folder(tenant))

    def num_bytes(self, tenant: str = "") -> int:
        """On disk, measured from the files: right after a restart, and for what other processes add."""
        return paths.stored_bytes(paths.tenant_folder(tenant))


def collection_storage(
    milvus_uri: str = "", milvus_token_file: Path | None = None, *, wait_s: float | None = None
) -> FolderStorage | MilvusStorage:
    """The storage on a Milvus, if there is an address of one. wait_s: for other writers; None: until one is dead."""
    if not milvus_uri:
        return FolderStorage()
    from kvarn.retrieval.milvus.collections import MilvusStorage

    return MilvusStorage(milvus_uri, milvus_token(milvus_token_file), wait_s=wait_s)


def open_or_search(
    storage: CollectionStorage, name: str, tenant: str, model: Model, chunking: Chunking | None
) -> Collection:
    """Open a collection to change it, or only to search it while another process has it."""
    exists = name in storage.names(tenant)
    try:
        return storage.open(name, tenant, model=model, chunking=None if exists else chunking)
    except StorageError as error:
        if not exists:
            raise
        log.info("a collection is open for reading only: %s", error)
        return storage.open_to_search(name, tenant, model=model)
