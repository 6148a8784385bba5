"""A semaphore whose free slots go to the highest waiting priority, and among equals to the first that came.

Knows priorities; knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter


class PrioritySemaphore:
    """For one event loop. num_reserved of the slots go only to priorities above those that hold the others."""

    def __init__(self, num_slots: int, num_reserved: int) -> None:
        self._num_slots = num_slots
        self._num_reserved = num_reserved
        self._held: Counter[int] = Counter()  # slots by priority
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # heap: -priority, arrival order, its slot
        self._arrivals = itertools.count()

    async def acquire(self, priority: int) -> None:
        """Wait for a slot; a waiter that is cancelled leaves the queue. release() it with the same priority."""
        if self._is_free(priority):  # then no one waits who would come first
            self._held[priority] += 1
            return
        granted = asyncio.get_running_loop().create_future()
        waiter = (-priority, next(self._arrivals), granted)
        heapq.heappush(self._waiting, waiter)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # granted and cancelled at the same moment
                self.release(priority)
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
                heapq.heapify(self._waiting)
            raise

    def release(self, priority: int) -> None:
        """Free a slot that was acquired at this priority."""
        self._held[priority] -= 1
        while self._waiting and self._is_free(-self._waiting[0][0]):
            negated, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                self._held[-negated] += 1
                granted.set_result(None)

    def _is_free(self, priority: int) -> bool:
        num_not_below = sum(number for other, number in self._held.items() if other >= priority)
        return self._held.total() < self._num_slots and num_not_below < self._num_slots - self._num_reserved
