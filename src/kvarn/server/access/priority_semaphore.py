"""A bounded number of places for work: a free one goes to the highest priority that waits, of equals to the first.

Knows callers' priorities; knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter

from kvarn.behalf import caller_priority


class PrioritySemaphore:
    """For one event loop. Some places may be kept for callers above those who have the others."""

    def __init__(self, number: int, num_kept: int) -> None:
        self._number = number
        self._num_kept = num_kept
        self._taken: Counter[int] = Counter()  # by priority
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # heap: -priority, order of coming, its turn
        self._order = itertools.count()

    async def take(self) -> int:
        """Wait for a place; leave() it with the priority that comes back. Who is cancelled leaves the queue."""
        priority = caller_priority.get()
        if self._is_free(priority):  # then nobody waits who would come first
            self._taken[priority] += 1
            return priority
        turn = asyncio.get_running_loop().create_future()
        waiting = (-priority, next(self._order), turn)
        heapq.heappush(self._waiting, waiting)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same moment
                self.leave(priority)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
            raise
        return priority

    def leave(self, priority: int) -> None:
        self._taken[priority] -= 1
        while self._waiting and self._is_free(-self._waiting[0][0]):
            negated, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._taken[-negated] += 1
                turn.set_result(None)

    def _is_free(self, priority: int) -> bool:
        num_not_below = sum(number for other, number in self._taken.items() if other >= priority)
        return self._taken.total() < self._number and num_not_below < self._number - self._num_kept
