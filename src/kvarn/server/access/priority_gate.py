"""The way in: while requests of higher tiers run, those of lower ones come in one by one.

Reading, checking and refusing a request takes milliseconds of the cores that compute. Clients that were told to come
again in whole seconds, or whose answers ended in one step, all come at once; spread, they delay nobody's token much.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from kvarn.server.access.keys import Principal
from kvarn.server.process.lifecycle import App, Receive, Scope, Send

SPACING_S = 0.02  # about one to a step
MAX_WAIT_S = 1.0  # nobody is held up longer, however many come


class PriorityGate:
    """ASGI, inside of auth: holds what lower tiers want computed for a moment, not what they look at or cancel."""

    def __init__(self, app: App, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        self._num_inside: Counter[int] = Counter()  # requests being answered, by priority of their tier
        self._next_at: dict[int, float] = {}  # when the next one may come in, by priority

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal: Principal | None = scope.get("kvarn.principal")
        if principal is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        priority = principal.tier.priority
        if (wait_s := self.wait_s(priority)) > 0:
            await asyncio.sleep(wait_s)
        self._num_inside[priority] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_inside[priority] -= 1

    def wait_s(self, priority: int) -> float:
        """Seconds until a request that has just come may go on; the next one waits for it."""
        if not any(number and other > priority for other, number in self._num_inside.items()):
            return 0.0
        now = self._clock()
        comes_at = min(max(now, self._next_at.get(priority, now)), now + MAX_WAIT_S)
        self._next_at[priority] = comes_at + SPACING_S
        return comes_at - now
