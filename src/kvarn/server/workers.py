"""Threads for work that may wait for an engine, as all that collections and reranking do.

Apart from the threads in which every request is read and encoded, so that a crowd which waits for embeddings keeps
nobody from those. Knows callers' priorities; knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from kvarn.behalf import caller_priority
from kvarn.server.patience import while_awaited

if TYPE_CHECKING:
    from kvarn.server.call import Call

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS = 16
NUM_KEPT = 4  # of them are for callers above those who have the others


class Workers:
    """A free thread goes to the waiting caller of the highest priority, of equals to the first. For one event loop."""

    def __init__(self, num_threads: int = NUM_THREADS, num_kept: int = NUM_KEPT) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "kvarn-worker")
        self._num_threads = num_threads
        self._num_kept = num_kept
        self._running: Counter[int] = Counter()  # by priority; also what runs for callers who are gone
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # heap: -priority, order of coming, its turn
        self._numbers = itertools.count()

    async def run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of work, done in a thread in the caller's context; who leaves the queue never has it begun.

        Work that has begun goes on when its caller is cancelled, and keeps its thread: leaving makes no room for more.
        """
        priority = caller_priority.get()
        await self._turn(priority)
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        future = self._pool.submit(lambda: context.run(work, *args, **options))
        future.add_done_callback(lambda _: self._end(loop, priority))
        return await asyncio.wrap_future(future)

    async def _turn(self, priority: int) -> None:
        if self._has_place(priority):  # then nobody waits who would come first
            self._running[priority] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = (-priority, next(self._numbers), turn)
        heapq.heappush(self._waiting, waiting)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same moment
                self._leave(priority)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
            raise

    def _has_place(self, priority: int) -> bool:
        num_running = self._running.total()
        num_not_below = sum(number for other, number in self._running.items() if other >= priority)
        return num_running < self._num_threads and num_not_below < self._num_threads - self._num_kept

    def _end(self, loop: asyncio.AbstractEventLoop, priority: int) -> None:
        """Runs in the thread that has become free."""
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(self._leave, priority)

    def _leave(self, priority: int) -> None:
        self._running[priority] -= 1
        while self._waiting and self._has_place(-self._waiting[0][0]):
            negated, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._running[-negated] += 1
                turn.set_result(None)


class Spending:
    """Tokens that a call's work in threads has cost so far. What still runs for a caller who left counts too."""

    def __init__(self, call: Call) -> None:
        self._workers = call.state.workers
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


async def work_for(call: Call, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """The result of work done in a thread, for as long as the caller waits for it and the server may give it."""
    caller_priority.set(call.principal.tier.priority)  # also of calls that only look at something
    return await while_awaited(call, call.state.workers.run(work, *args, **options))
