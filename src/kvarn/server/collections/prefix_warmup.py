"""Prompts of hot questions, computed before they are asked again: when documents changed, or the KV cache lost them.

Works only while the server has nothing else to do, one prompt at a time, with models that are loaded; a prompt that is
still cached costs next to nothing. What it computes is salted for the tenant that asked, as the answer was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvarn.behalf import caller_priority
from kvarn.engine.handle import Ticket
from kvarn.errors import KvarnError
from kvarn.server.chat.conversation import chat_submission
from kvarn.server.chat.generation_plan import tenant_of
from kvarn.server.collections.chat_retrieval import with_messages
from kvarn.types import MAX_PRIORITY

if TYPE_CHECKING:
    from kvarn.engine.submission import Submission
    from kvarn.observe.metrics import Metrics
    from kvarn.retrieval.collection import Collection
    from kvarn.server.access.keys import Principal
    from kvarn.server.chat.conversation import Conversation
    from kvarn.server.collections.collection_pool import CollectionPool
    from kvarn.server.models.model_pool import ModelPool, ServedModel
    from kvarn.server.process.lifecycle import Lifecycle

log = logging.getLogger("kvarn.server.retrieval")
LOOK_EVERY_S = 0.5
AGAIN_AFTER_S = 60.0  # a prompt may have been evicted meanwhile
MAX_REMEMBERED = 64
Key = tuple[str, str, str, str]  # tenant, model, collection, question


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


@dataclass(slots=True)
class _Known:
    """A hot chat, and the state of its collection for which its prompt was computed last."""

    hot: HotChat
    version: int
    primed_at: float


class PrefixWarmup:
    """Remembers hot chats and primes them while the server is idle. Lives in the event loop."""

    def __init__(self, models: ModelPool, collections: CollectionPool, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self._models = models
        self._collections = collections
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._chats: OrderedDict[Key, _Known] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def remember(self, hot: HotChat, version: int) -> None:
        """Take a chat that was just answered at a version of its collection: its prompt is in the cache now."""
        key = (hot.principal.tenant, hot.model, hot.collection, hot.question)
        self._chats[key] = _Known(hot, version, time.monotonic())
        self._chats.move_to_end(key)
        while len(self._chats) > MAX_REMEMBERED:
            self._chats.popitem(last=False)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop priming; never raises."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        caller_priority.set(-MAX_PRIORITY)  # behind everybody, whoever's question began this
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for key, known in list(self._chats.items())[::-1]:
                if self._is_idle and self._is_known(key, known):
                    await self._prime_or_forget(key, known)

    @property
    def _is_idle(self) -> bool:
        return self._lifecycle.phase == "ready" and self._lifecycle.num_requests == 0

    def _is_known(self, key: Key, known: _Known) -> bool:
        """Whether a chat was neither forgotten nor asked again meanwhile."""
        return self._chats.get(key) is known

    async def _prime_or_forget(self, key: Key, known: _Known) -> None:
        try:
            await self._prime_if_due(known)
        except Exception as error:  # the collection was dropped, the prompt no longer fits: nothing to prime
            # The type only: the words of an exception may quote the question.
            level = logging.INFO if isinstance(error, KvarnError) else logging.ERROR
            log.log(level, "a hot question was forgotten: %s", type(error).__name__)
            if self._is_known(key, known):
                del self._chats[key]

    async def _prime_if_due(self, known: _Known) -> None:
        hot = known.hot
        if not self._has_models(hot):
            return
        async with self._collections.use(hot.principal.tenant, hot.collection) as collection:
            version = collection.version
            is_recent = time.monotonic() - known.primed_at < AGAIN_AFTER_S
            if (version == known.version and is_recent) or not self._has_models(hot):
                return
            await self._prime(hot, collection)
            known.version, known.primed_at = version, time.monotonic()
            self._metrics.prefix_warmed()

    def _has_models(self, hot: HotChat) -> bool:
        """Whether nothing needs to be loaded: that would put out a model that somebody uses."""
        return all(self._models.is_loaded(name) for name in (hot.model, self._collections.embedding_model))

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
