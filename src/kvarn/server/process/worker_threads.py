"""Threads for work that may wait for an engine, as all that collections and reranking do.

Apart from the threads in which every request is read and encoded, so that a crowd which waits for embeddings keeps
nobody from those.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from kvarn.behalf import caller_priority
from kvarn.server.access.priority_semaphore import PrioritySemaphore
from kvarn.server.http.disconnect import while_awaited

if TYPE_CHECKING:
    from kvarn.server.request_context import RequestContext

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS = 16
NUM_KEPT = 4  # of them are for callers above those who have the others


class WorkerThreads:
    """Each piece of work has a thread, in the order of its caller's priority. For one event loop."""

    def __init__(self, num_threads: int = NUM_THREADS, num_kept: int = NUM_KEPT) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "kvarn-worker")
        self._places = PrioritySemaphore(num_threads, num_kept)

    async def run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of work, done in a thread in the caller's context; who leaves the queue never has it begun.

        Work that has begun goes on when its caller is cancelled, and keeps its thread: leaving makes no room for more.
        """
        priority = await self._places.take()
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        future = self._pool.submit(lambda: context.run(work, *args, **options))
        future.add_done_callback(lambda _: self._end(loop, priority))
        return await asyncio.wrap_future(future)

    def _end(self, loop: asyncio.AbstractEventLoop, priority: int) -> None:
        """Runs in the thread that has become free."""
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(self._places.leave, priority)


class TokenMeter:
    """Tokens that a call's work in threads has cost so far. What still runs for a caller who left counts too."""

    def __init__(self, workers: WorkerThreads) -> None:
        self._workers = workers
        self.num_tokens = 0

    async def run(self, num_tokens: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Have work done that costs so much from the moment it begins, unless it fails."""

        def counted() -> T:
            self.num_tokens += num_tokens
            return work(*args, **options)

        try:
            return await self._workers.run(counted)
        except Exception:
            self.num_tokens -= num_tokens
            raise


async def work_for(
    request: RequestContext, workers: WorkerThreads, work: Callable[P, T], *args: P.args, **options: P.kwargs
) -> T:
    """The result of work done in a thread, for as long as the caller waits for it and the server may give it."""
    caller_priority.set(request.principal.tier.priority)  # also of calls that only look at something
    return await while_awaited(request, workers.run(work, *args, **options))
