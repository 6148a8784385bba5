"""Prompts of hot questions, computed before they are asked again: when documents changed, or the KV cache lost them.

Works only while the server has nothing else to do, one prompt at a time; a prompt that is still cached costs next to
nothing. What it computes is salted for the tenant that asked, as the answer was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvarn.behalf import caller_priority
from kvarn.engine.handle import Ticket
from kvarn.errors import KvarnError
from kvarn.server.planning import tenant_of
from kvarn.server.retrieving import with_messages
from kvarn.server.translate import chat_submission
from kvarn.types import MAX_PRIORITY

if TYPE_CHECKING:
    from kvarn.engine.runner import Submission
    from kvarn.observe.metrics import Metrics
    from kvarn.retrieval.collection import Collection
    from kvarn.server.collecting import CollectionShelf
    from kvarn.server.keys import Principal
    from kvarn.server.lifecycle import Lifecycle
    from kvarn.server.shelf import ModelShelf, ServedModel
    from kvarn.server.translate import Conversation

log = logging.getLogger("kvarn.server.retrieval")
LOOK_EVERY_S = 0.5
AGAIN_AFTER_S = 60.0  # a prompt may have been evicted meanwhile
MAX_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class HotChat:
    """A chat that may come again."""

    principal: Principal
    cache_salt: str
    model: str
    collection: str
    question: str  # as the collection's hot cache names it
    chat: Conversation  # without sources
    options: dict[str, Any] = field(hash=False)


class Primer:
    """Remembers hot chats and primes them while the server is idle. Lives in the event loop."""

    def __init__(
        self, models: ModelShelf, collections: CollectionShelf, lifecycle: Lifecycle, metrics: Metrics
    ) -> None:
        self._models = models
        self._collections = collections
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._chats: OrderedDict[tuple[str, str, str, str], HotChat] = OrderedDict()
        self._done: dict[tuple[str, str, str, str], tuple[int, float]] = {}  # version and time of the last priming
        self._task: asyncio.Task[None] | None = None

    def remember(self, hot: HotChat, version: int) -> None:
        """Take a chat that was just answered at a version of its collection: its prompt is in the cache now."""
        key = (hot.principal.tenant, hot.model, hot.collection, hot.question)
        self._chats[key] = hot
        self._chats.move_to_end(key)
        self._done[key] = (version, time.monotonic())
        while len(self._chats) > MAX_REMEMBERED:
            old, _ = self._chats.popitem(last=False)
            del self._done[old]
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        caller_priority.set(-MAX_PRIORITY)  # behind everybody, whoever's question began this
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for key, hot in list(self._chats.items())[::-1]:
                if self._is_idle:
                    await self._prime_if_due(key, hot)

    @property
    def _is_idle(self) -> bool:
        return self._lifecycle.phase == "ready" and self._lifecycle.num_requests == 0

    async def _prime_if_due(self, key: tuple[str, str, str, str], hot: HotChat) -> None:
        try:
            async with self._collections.use(hot.principal.tenant, hot.collection) as collection:
                version, primed_at = self._done[key]
                is_recent = time.monotonic() - primed_at < AGAIN_AFTER_S
                if collection.version == version and is_recent:
                    return
                version = collection.version
                await self._prime(hot, collection)
        except KvarnError as error:  # the collection was dropped, the prompt no longer fits: nothing to prime
            log.info("a hot question was forgotten: %s", type(error).__name__)
            self._chats.pop(key, None)
            self._done.pop(key, None)
            return
        self._done[key] = (version, time.monotonic())
        self._metrics.primed()

    async def _prime(self, hot: HotChat, collection: Collection) -> None:
        async with self._models.use(collection.embedder.name), self._models.use(hot.model) as served:
            submission = await asyncio.to_thread(partial(_grounded, served, hot, collection))
            ticket = Ticket(keeps_events=False)
            try:
                await served.llm.send([submission], [ticket])
                await asyncio.wrap_future(ticket.done)
            finally:
                ticket.cancel()


def _grounded(served: ServedModel, hot: HotChat, collection: Collection) -> Submission:
    """Runs in a worker thread: the prompt as the next asker's request will have it."""
    grounded = served.llm.llm.ground(hot.chat.messages, collection.grounding(**hot.options))
    submission = chat_submission(served, with_messages(hot.chat, grounded))
    params = submission.params.replace(
        prefill_only=True, priority=-MAX_PRIORITY, n=1, logprobs=None, prompt_logprobs=None
    )
    return replace(submission, params=params, tenant=tenant_of(hot.principal, hot.cache_salt), constraint=None)
