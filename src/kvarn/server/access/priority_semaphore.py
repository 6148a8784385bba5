"""A semaphore whose free slots go to the highest waiting priority, among equals to the key served longest ago.

Knows priorities and keys; knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """For whom a slot is wanted."""

    priority: int = 0
    owner: str | None = None  # the key; None: there are none, and nobody to share with


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    claim: Claim
    arrival: int
    granted: asyncio.Future[None]


class PrioritySemaphore:
    """For one event loop. num_reserved of the slots go only to priorities above those that hold the others.

    max_per_owner: slots that one key holds at a time, however many are free: work that has begun is not interrupted,
    so the next key must find one.
    """

    def __init__(self, num_slots: int, num_reserved: int, max_per_owner: int | None = None) -> None:
        self._num_slots = num_slots
        self._num_reserved = num_reserved
        self._max_per_owner = max_per_owner
        self._held: Counter[Claim] = Counter()  # slots
        self._waiting: dict[Claim, deque[_Waiter]] = {}  # in order of arrival
        self._served_at: dict[str | None, int] = {}  # by owner: when it last got a slot, while anybody waits
        self._ticks = itertools.count(1)

    async def acquire(self, claim: Claim) -> None:
        """Wait for a slot; a waiter that is cancelled leaves the queue. release() it with the same claim."""
        if self._is_free(claim):  # then no one waits who could have it
            self._take(claim)
            return
        waiter = _Waiter(claim, next(self._ticks), asyncio.get_running_loop().create_future())
        self._waiting.setdefault(claim, deque()).append(waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if not waiter.granted.cancelled():  # granted and cancelled at the same moment
                self.release(claim)
            else:
                self._leave(waiter)
            raise

    def release(self, claim: Claim) -> None:
        """Free a slot that was acquired with this claim."""
        self._held[claim] -= 1
        if not self._held[claim]:
            del self._held[claim]
        while (waiter := self._next()) is not None:
            self._leave(waiter)
            if not waiter.granted.done():
                self._take(waiter.claim)
                waiter.granted.set_result(None)
        if not self._waiting:
            self._served_at.clear()

    def _next(self) -> _Waiter | None:
        """The first of those that may have a slot now."""
        able = [waiters[0] for claim, waiters in self._waiting.items() if self._is_free(claim)]
        return min(able, key=self._order, default=None)

    def _leave(self, waiter: _Waiter) -> None:
        """Take a waiter out of the queue, if it is in it."""
        waiters = self._waiting.get(waiter.claim, deque())
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiting.pop(waiter.claim, None)

    def _order(self, waiter: _Waiter) -> tuple[int, int, int]:
        return -waiter.claim.priority, self._served_at.get(waiter.claim.owner, 0), waiter.arrival

    def _take(self, claim: Claim) -> None:
        self._held[claim] += 1
        if claim.owner is not None:
            self._served_at[claim.owner] = next(self._ticks)

    def _is_free(self, claim: Claim) -> bool:
        num_not_below = sum(number for other, number in self._held.items() if other.priority >= claim.priority)
        is_room = self._held.total() < self._num_slots and num_not_below < self._num_slots - self._num_reserved
        if not is_room or self._max_per_owner is None or claim.owner is None:
            return is_room
        num_own = sum(number for other, number in self._held.items() if other.owner == claim.owner)
        return num_own < self._max_per_owner
