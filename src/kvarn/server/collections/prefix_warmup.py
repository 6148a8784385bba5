"""Prompts of frequent queries, computed before they come again: when documents changed, or the KV cache evicted them.

Their blocks are kept: up to a share of the cache, floods of other prompts evict them last.
Runs only while the server is idle, one prompt at a time, on models that are loaded; a prompt that is still cached costs
next to nothing. Its cache entries are salted for the tenant of the original request, as the answer's were.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvarn.errors import KvarnError
from kvarn.server.chat.generation_plan import chat_submission, tenant_of
from kvarn.server.collections.chat_retrieval import with_messages
from kvarn.types import MAX_PRIORITY

if TYPE_CHECKING:
    from kvarn.engine.submission import Submission
    from kvarn.observe.metrics import Metrics
    from kvarn.retrieval.collection import Collection
    from kvarn.server.access.keys import Principal
    from kvarn.server.chat.conversation import Conversation
    from kvarn.server.collections.collection_pool import CollectionPool
    from kvarn.server.models.model_pool import ModelPool
    from kvarn.server.models.served_model import ServedModel
    from kvarn.server.process.lifecycle import Lifecycle

log = logging.getLogger("kvarn.server.retrieval")
POLL_INTERVAL_S = 0.5
REFRESH_AFTER_S = 60.0  # the prompt may have been evicted meanwhile
MAX_CHATS = 64
PRIORITY = -MAX_PRIORITY  # behind every request, whatever the tier of the original caller
Key = tuple[str, str, str, str]  # tenant, model, collection, query key


@dataclass(frozen=True, slots=True)
class FrequentChat:
    """A chat with retrieval that may come again."""

    principal: Principal
    cache_salt: str
    model: str
    collection: str
    query_key: str  # in the collection's query cache
    chat: Conversation  # without sources
    options: dict[str, Any] = field(hash=False)


@dataclass(slots=True)
class _WarmChat:
    """A frequent chat, and for which version of its collection its prompt was computed, and when."""

    chat: FrequentChat
    version: int
    warmed_at: float | None = None  # None: it was answered, and not kept yet


class PrefixWarmup:
    """Keeps the prompts of frequent chats in the prefix cache while the server is idle. For one event loop."""

    def __init__(self, models: ModelPool, collections: CollectionPool, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self._models = models
        self._collections = collections
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._chats: OrderedDict[Key, _WarmChat] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def add(self, chat: FrequentChat, version: int) -> None:
        """Take a chat that was just answered at a version of its collection: its prompt is in the cache now."""
        key = (chat.principal.tenant, chat.model, chat.collection, chat.query_key)
        known = self._chats.get(key)
        if known is None or (known.chat, known.version) != (chat, version):
            self._chats[key] = _WarmChat(chat, version)
        self._chats.move_to_end(key)
        while len(self._chats) > MAX_CHATS:
            self._chats.popitem(last=False)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; never raises."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            for key, entry in list(self._chats.items())[::-1]:
                if self._is_idle and self._is_current(key, entry):
                    await self._warm_or_drop(key, entry)

    @property
    def _is_idle(self) -> bool:
        return self._lifecycle.phase == "ready" and self._lifecycle.num_requests == 0

    def _is_current(self, key: Key, entry: _WarmChat) -> bool:
        """Whether a chat was neither dropped nor answered again meanwhile."""
        return self._chats.get(key) is entry

    async def _warm_or_drop(self, key: Key, entry: _WarmChat) -> None:
        try:
            await self._warm_if_due(entry)
        except Exception as error:  # the collection was dropped, the prompt no longer fits: nothing to compute
            # The type only: the message of an exception may quote the query.
            level = logging.INFO if isinstance(error, KvarnError) else logging.ERROR
            log.log(level, "a hot question was forgotten: %s", type(error).__name__)
            if self._is_current(key, entry):
                del self._chats[key]

    async def _warm_if_due(self, entry: _WarmChat) -> None:
        chat = entry.chat
        if not self._has_models(chat):
            return
        async with self._collections.use(chat.principal.tenant, chat.collection) as collection:
            version = await asyncio.to_thread(lambda: collection.version)
            is_recent = entry.warmed_at is not None and time.monotonic() - entry.warmed_at < REFRESH_AFTER_S
            if (version == entry.version and is_recent) or not self._has_models(chat):
                return
            await self._warm(chat, collection.at_priority(PRIORITY))
            entry.version, entry.warmed_at = version, time.monotonic()
            self._metrics.prefix_warmed()

    def _has_models(self, chat: FrequentChat) -> bool:
        """Whether nothing needs to be loaded: that would evict a model that is in use."""
        return all(self._models.is_loaded(name) for name in (chat.model, self._collections.embedding_model))

    async def _warm(self, chat: FrequentChat, collection: Collection) -> None:
        async with self._models.use(collection.embedder.name), self._models.use(chat.model) as served:
            submission = await asyncio.to_thread(partial(_submission, served, chat, collection))
            answers = served.llm.llm.client.stream_async(1)
            try:
                await answers.submit([submission])
                await answers.results()
            finally:
                answers.release()


def _submission(served: ServedModel, chat: FrequentChat, collection: Collection) -> Submission:
    """Runs in a worker thread: the prompt as the next request of this chat will have it, for prefill only."""
    grounded = served.llm.llm.ground(chat.chat.messages, collection.grounding(**chat.options))
    conversation = with_messages(chat.chat, grounded)
    submission = chat_submission(served, conversation, conversation.output_plan(served))
    plain = submission.params.replace(n=1, logprobs=None, prompt_logprobs=None, constraint=None)
    params = plain.replace(prefill_only=True, keep_cache=True, priority=PRIORITY)
    tenant = tenant_of(chat.principal, chat.cache_salt)
    return replace(submission, params=params, tenant=tenant, adapters=served.adapters, constraint=None)
