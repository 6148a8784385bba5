"""Tells all routers that listen what this server holds and how busy it is. Works only while somebody listens.

One task asks the engines between their steps and hands each listener its part: a new one everything, others what
changed. A listener that does not read is told everything anew, once it does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvarn import __version__
from kvarn.errors import KvarnError
from kvarn.routing.cluster_key import ClusterKey
from kvarn.routing.feed import FeedFrame, FeedWriter, ReplicaIdentity, ReplicaLoad, total_load
from kvarn.routing.text_prefix import read_marks
from kvarn.server.replica.engine_report import EngineReport, take_report

if TYPE_CHECKING:
    from kvarn.async_llm import AsyncLLM
    from kvarn.server.models.model_pool import ModelPool
    from kvarn.server.process.lifecycle import Lifecycle

log = logging.getLogger("kvarn.server.replica")
INTERVAL_S = 0.02  # between two questions to the engines
LOAD_S = 0.2  # a load that is all that changed is told so much later: a router counts what it sent itself
HEARTBEAT_S = 1.0  # at most this long between two lines
MAX_UNREAD_BYTES = 8 << 20  # of changes that a listener has not read


class _Listener:
    """One router: changes that it has not been told."""

    def __init__(self) -> None:
        self.changes: list[bytes] = []
        self.is_all = False
        self.needs_all = True
        self.wakes = asyncio.Event()

    def add(self, changes: bytes, *, is_all: bool) -> None:
        if is_all:
            self.changes, self.is_all, self.needs_all = [changes], True, False
        elif not self.needs_all and changes:
            self.changes.append(changes)
            if sum(map(len, self.changes)) > MAX_UNREAD_BYTES:
                self.changes, self.needs_all = [], True

    def take(self) -> tuple[bytes, bool]:
        taken = b"".join(self.changes), self.is_all
        self.changes, self.is_all = [], False
        self.wakes.clear()
        return taken


class ReplicaPublisher:
    """For one event loop. Without a cluster key there is nobody to tell."""

    def __init__(self, key_path: str | None, models: ModelPool, lifecycle: Lifecycle, tag: str) -> None:
        """tag: that ids of this server's requests begin with."""
        self._key = None if key_path is None else ClusterKey.read(Path(key_path))
        self._models = models
        self._lifecycle = lifecycle
        self._tag = tag
        self._listeners: set[_Listener] = set()
        self._polling: asyncio.Task[None] | None = None
        self._told: list[AsyncLLM] = []  # whose blocks are known to listeners
        self._load = self._told_load = ReplicaLoad()
        self._told_at = 0.0

    @property
    def is_member(self) -> bool:
        """Whether this server belongs to a cluster."""
        return self._key is not None

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def marks(self, value: bytes) -> tuple[tuple[int, int], ...]:
        """The texts that a router named with a request."""
        return () if self._key is None else read_marks(self._key, value)

    def writer(self, proof: str) -> FeedWriter | None:
        """For a router that proves to have the key."""
        return None if self._key is None else FeedWriter.answering(self._key, proof)

    async def lines(self, writer: FeedWriter) -> AsyncIterator[bytes]:
        """What one router is told, until this server takes no more requests."""
        listener = _Listener()
        self._listeners.add(listener)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        try:
            yield writer.hello(self._identity())
            names: tuple[str, ...] = ()
            while self._lifecycle.accepts_requests:
                try:
                    await asyncio.wait_for(listener.wakes.wait(), HEARTBEAT_S)
                except TimeoutError:
                    listener.wakes.clear()
                changes, is_all = listener.take()
                before, names = names, self._own_names
                new_names = None if names == before else names
                yield writer.frame(FeedFrame(self._lifecycle.phase, self._load, changes, is_all, new_names))
            yield writer.frame(FeedFrame(self._lifecycle.phase, self._load))
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    async def _poll(self) -> None:
        """Ask the engines as long as somebody listens; one that does not answer holds up nobody's heartbeat."""
        known = self._lifecycle.phase, self._own_names
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                has_news = await self._ask()
            except KvarnError as error:  # an engine that is closed
                log.warning("an engine told nothing: %s", type(error).__name__)
                has_news, self._told = False, []
                await asyncio.sleep(HEARTBEAT_S)
            now = self._lifecycle.phase, self._own_names
            if has_news or now != known:
                known = now
                for listener in self._listeners:
                    listener.wakes.set()

    async def _ask(self) -> bool:
        """Take the engines' reports to all listeners; whether there is anything new."""
        loaded = [model.llm for model in self._models.loaded]
        wants_everything = loaded != self._told or any(one.needs_all for one in self._listeners)
        reports = await self._reports(loaded, wants_everything)
        if not wants_everything and any(one.is_all for one in reports):
            wants_everything = True
            reports = await self._reports(loaded, True)
        self._told = loaded
        self._load = total_load(one.load for one in reports)
        changes = b"".join(one.changes for one in reports if not one.is_all)
        if wants_everything:
            changes = b"".join(one.everything or b"" for one in reports)
        for listener in self._listeners:
            listener.add(changes, is_all=wants_everything)
        is_late = self._load != self._told_load and time.monotonic() - self._told_at > LOAD_S
        has_news = bool(changes) or wants_everything or is_late
        if has_news:
            self._told_load, self._told_at = self._load, time.monotonic()
        return has_news

    async def _reports(self, loaded: Sequence[AsyncLLM], wants_everything: bool) -> list[EngineReport]:
        question = partial(take_report, wants_everything)
        return await asyncio.gather(*(asyncio.wrap_future(one.llm.client.call(question)) for one in loaded))

    @property
    def _own_names(self) -> tuple[str, ...]:
        """Of adapters, and of models that came since the start: other replicas may not have them."""
        return (*sorted(self._models.added_ids), *self._models.adapters.names)

    def _identity(self) -> ReplicaIdentity:
        sizes = {model.id: model.llm.llm.admission.kv.block_size for model in self._models.loaded}
        own = frozenset(self._own_names)
        models = {
            entry.id: {"digest": entry.digest, "block_size": sizes.get(entry.id)}
            for entry in self._models.entries()
            if entry.id not in own
        }
        return ReplicaIdentity(__version__, models, self._tag)
