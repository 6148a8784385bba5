"""Threads for work that may wait for an engine: everything that collections and reranking do.

Separate from the default executor, in which every request is parsed and encoded, so that many requests waiting for
embeddings do not delay that. Knows priorities and token counts; knows nothing of the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from kvarn.server.access.priority_semaphore import Claim, PrioritySemaphore

if TYPE_CHECKING:
    from kvarn.server.request_context import RequestContext

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS = 16
NUM_RESERVED = 4  # of them are for callers of a higher priority than those that hold the others
MAX_PER_KEY = 10  # threads that one key has at a time, so that another finds one


class WorkerThreads:
    """Each piece of work gets a thread, by its caller's priority and in turns among keys. For one event loop."""

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        num_reserved: int = NUM_RESERVED,
        max_per_key: int | None = MAX_PER_KEY,
    ) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "kvarn-worker")
        self._slots = PrioritySemaphore(num_threads, num_reserved, max_per_key)

    async def run(self, claim: Claim, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run work in a thread. Cancelled while it is queued, it never begins.

        Work that has begun continues when its caller is cancelled, and keeps its thread: disconnecting frees no slot.
        """
        await self._slots.acquire(claim)
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work, *args, **options)
        future.add_done_callback(lambda _: self._release(loop, claim))
        return await asyncio.wrap_future(future)

    def _release(self, loop: asyncio.AbstractEventLoop, claim: Claim) -> None:
        """Runs in the thread that has become free."""
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(self._slots.release, claim)


class TokenMeter:
    """Tokens that one request's work in threads has cost so far, including work that outlives a disconnected client."""

    def __init__(self, request: RequestContext, workers: WorkerThreads) -> None:
        self._workers = workers
        self._claim = request.principal.claim
        self.num_tokens = 0

    async def run(self, num_tokens: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run work in a thread; its tokens count from the moment it begins, unless it fails."""

        def counted() -> T:
            self.num_tokens += num_tokens
            return work(*args, **options)

        try:
            return await self._workers.run(self._claim, counted)
        except Exception:
            self.num_tokens -= num_tokens
            raise


async def work_for(
    request: RequestContext, workers: WorkerThreads, work: Callable[P, T], *args: P.args, **options: P.kwargs
) -> T:
    """Run work in a thread for the caller, and wait only as long as the client and the server do."""
    guarded = request.wanted(partial(work, *args, **options))
    return await request.while_awaited(workers.run(request.principal.claim, guarded))
