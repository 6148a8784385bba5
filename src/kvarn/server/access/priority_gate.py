"""Admission by priority: while requests of higher tiers run, those of lower tiers are admitted one by one.

Reading, checking and refusing a request takes milliseconds of the cores that compute. Clients that were told to retry
after whole seconds, or whose answers ended in one step, all send at once; spread out, they delay each token less.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvarn.server.access.keys import Principal

SPACING_S = 0.02  # about one to a step
MAX_WAIT_S = 1.0  # no request is held longer, however many there are


class PriorityGate:
    """Holds POST requests of lower tiers for a moment; lookups and cancellations pass at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_running: Counter[int] = Counter()  # admitted requests, by priority of their tier
        self._next_at: dict[int, float] = {}  # when the next one may be admitted, by priority

    @asynccontextmanager
    async def admitted(self, principal: Principal | None, method: str) -> AsyncIterator[None]:
        """Wait for admission; the request counts as running while the block runs."""
        if principal is None or method != "POST":
            yield
            return
        priority = principal.tier.priority
        if (wait_s := self.wait_s(priority)) > 0:
            await asyncio.sleep(wait_s)
        self._num_running[priority] += 1
        try:
            yield
        finally:
            self._num_running[priority] -= 1

    def wait_s(self, priority: int) -> float:
        """Seconds until a request that has just arrived is admitted; the next one waits for it."""
        if not any(number and other > priority for other, number in self._num_running.items()):
            return 0.0
        now = self._clock()
        admitted_at = min(max(now, self._next_at.get(priority, now)), now + MAX_WAIT_S)
        self._next_at[priority] = admitted_at + SPACING_S
        return admitted_at - now
