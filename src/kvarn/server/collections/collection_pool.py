"""The open collections of one server, by tenant: opened on first use, the least recently used one closed for room.

Imports retrieval when the first request needs it. For one event loop; files, or Milvus, are accessed in threads only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from kvarn.config import milvus_token
from kvarn.errors import (
    CapacityError,
    CollectionLocked,
    CollectionNotFound,
    ConfigError,
    InvalidParameter,
    StorageError,
)
from kvarn.server.failures import RetrievalUnavailable
from kvarn.server.http.limits import max_open_collections

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.collection_storage import CollectionStorage
    from kvarn.retrieval.ingest.chunking import Chunking
    from kvarn.server.models.model_pool import ModelPool
    from kvarn.server.process.settings import ServerConfig

log = logging.getLogger("kvarn.server.retrieval")
T = TypeVar("T")
RETRY_AFTER_S = 2.0
WRITER_WAIT_S = 5.0  # for another replica that changes the same collection


class CollectionPool:
    """Open collections by tenant and name."""

    def __init__(self, models: ModelPool, storage: Callable[[], CollectionStorage]) -> None:
        """storage: makes it, or tells which one was made; called in threads, and not before a request needs it."""
        self._models = models
        self._storage = storage
        self._open: OrderedDict[tuple[str, str], _CollectionEntry] = OrderedDict()
        self._changing = asyncio.Lock()  # one collection is opened or closed at a time
        self._closed_counts = (0, 0)  # cache hits and misses of collections that were closed

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def query_cache_counts(self) -> tuple[int, int]:
        """Hits and misses of all query caches since the start."""
        counts = [entry.collection.query_cache.counts for entry in self._open.values()]
        hits, misses = self._closed_counts
        return hits + sum(one.hits for one in counts), misses + sum(one.misses for one in counts)

    @property
    def embedding_model(self) -> str:
        """The first encoder among the models of the server."""
        for entry in self._models.entries():
            if entry.kind == "embed":
                return entry.id
        raise InvalidParameter(
            "this server has no embedding model; start it with --model minilm beside the others", field=None
        )

    async def names(self, tenant: str) -> list[str]:
        return list(await _in_thread(lambda: self._storage().names(tenant)))

    async def create(self, tenant: str, name: str, chunking: Chunking) -> None:
        """Create a collection; an existing one stays as it is."""
        await _uncancelled(self._ensure_open(tenant, name, chunking))

    async def drop(self, tenant: str, name: str) -> None:
        """Remove a collection with everything in it."""
        await _uncancelled(self._drop(tenant, name))

    @asynccontextmanager
    async def use(self, tenant: str, name: str, *, changes: bool = False) -> AsyncIterator[Collection]:
        """Keep a collection open while the block runs; CollectionNotFound for names this tenant does not have.

        changes: it will be changed, or CollectionLocked while another process may.
        """
        key = (tenant, name)
        if changes:
            await _uncancelled(self._close_read_only(tenant, name))
        entry = await self._current(key)
        if changes and not entry.collection.is_writable:
            raise CollectionLocked(f"collection {name!r} is being changed by another process")
        entry.num_users += 1
        self._open.move_to_end(key)
        try:
            yield entry.collection
        finally:
            entry.num_users -= 1

    async def close(self) -> None:
        """Save and close everything."""
        async with self._changing:
            for key in list(self._open):
                await self._close_one(key)

    async def _close_read_only(self, tenant: str, name: str) -> None:
        """Close a collection that another process had when it was opened: that one may have ended meanwhile."""
        async with self._changing:
            entry = self._open.get((tenant, name))
            if entry is None or entry.collection.is_writable:
                return
            if entry.num_users:
                raise CapacityError(f"collection {name!r} is being searched; try again", retry_after_s=RETRY_AFTER_S)
            await self._close_one((tenant, name))

    async def _current(self, key: tuple[str, str]) -> _CollectionEntry:
        """The collection that has this name now: other replicas may have removed the open one, and made another."""
        while True:  # again if it was closed before this task ran
            if (entry := self._open.get(key)) is None:
                await _uncancelled(self._ensure_open(*key, None))
                continue
            is_there = entry.collection.folder is not None or await _in_thread(partial(_is_there, entry.collection))
            if self._open.get(key) is not entry:
                continue
            if is_there:
                return entry
            await _uncancelled(self._forget(key, entry))

    async def _forget(self, key: tuple[str, str], entry: _CollectionEntry) -> None:
        """Close a collection that is no more; requests that still use it fail with that."""
        async with self._changing:
            if self._open.get(key) is entry:
                await self._close_one(key)

    async def _drop(self, tenant: str, name: str) -> None:
        async with self._changing:
            entry = self._open.get((tenant, name))
            if entry is not None and entry.num_users:
                raise CapacityError(f"collection {name!r} is in use; try again", retry_after_s=RETRY_AFTER_S)
            await self._close_one((tenant, name))
            await _in_thread(lambda: self._storage().drop(name, tenant))

    async def _ensure_open(self, tenant: str, name: str, chunking: Chunking | None) -> None:
        """Open a collection unless it is open. Without a chunking it must exist."""
        async with self._changing:
            if (tenant, name) in self._open:
                return
            if chunking is None:
                await _in_thread(lambda: self._storage().require(name, tenant))
            await self._make_room()
            collection = await _in_thread(lambda: self._opened(tenant, name, chunking))
            self._open[tenant, name] = _CollectionEntry(collection)

    def _opened(self, tenant: str, name: str, chunking: Chunking | None) -> Collection:
        """Runs in a worker thread."""
        from kvarn.retrieval.collection_storage import open_or_search
        from kvarn.retrieval.embedder import ModelEmbedder

        embedder = ModelEmbedder(self.embedding_model, find=self._encoder)
        return open_or_search(self._storage(), name, tenant, embedder, chunking)

    def _encoder(self, name: str) -> LLM:
        """The loaded encoder; callers hold it by request.use_model."""
        for model in self._models.loaded:
            if model.id == name:
                return model.llm.llm
        raise CapacityError("the embedding model was unloaded meanwhile; try again", retry_after_s=RETRY_AFTER_S)

    async def _make_room(self) -> None:
        max_open = max_open_collections()
        idle = [key for key, entry in self._open.items() if not entry.num_users]
        num_surplus = len(self._open) + 1 - max_open
        if num_surplus > len(idle):
            raise CapacityError(f"{max_open} collections are in use; try again", retry_after_s=RETRY_AFTER_S)
        for key in idle[: max(num_surplus, 0)]:
            await self._close_one(key)

    async def _close_one(self, key: tuple[str, str]) -> None:
        entry = self._open.pop(key, None)
        if entry is None:
            return
        counts, (hits, misses) = entry.collection.query_cache.counts, self._closed_counts
        self._closed_counts = (hits + counts.hits, misses + counts.misses)
        try:
            await asyncio.to_thread(entry.collection.close)
        except StorageError:
            log.exception("a collection was not closed cleanly")


@dataclass(slots=True)
class _CollectionEntry:
    """An open collection and the number of requests that use it; in use, it is not closed."""

    collection: Collection
    num_users: int = field(default=0)


async def _uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that continues when this task is cancelled: half done, it would leave a folder locked."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved even if no one waits
    return await asyncio.shield(task)


def _is_there(collection: Collection) -> bool:
    """Whether a collection on another machine still exists."""
    try:
        return collection.version >= 0
    except CollectionNotFound:
        return False


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except ConfigError as error:
        raise RetrievalUnavailable(str(error)) from None


def storage_of(config: ServerConfig) -> Callable[[], CollectionStorage]:
    """What makes the storage that the settings name, when it is first needed; wrong settings are refused at once."""
    if config.milvus_uri:
        if find_spec("pymilvus") is None:
            raise ConfigError("milvus_uri is set, which needs pymilvus; run pip install 'kvarn[milvus]'")
        milvus_token(config.milvus_token_file)

    @cache
    def storage() -> CollectionStorage:
        from kvarn.retrieval.collection_storage import collection_storage

        return collection_storage(config.milvus_uri, config.milvus_token_file, wait_s=WRITER_WAIT_S)

    return storage
