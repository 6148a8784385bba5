"""Who the replicas of a deployment are, for the fleet of an ingress: each has a seat there while it runs.

    Ray's router ──MembershipWatch, from its thread──> ReplicaSeats ──> UpstreamSeat, as Forwarder and feeds use it

Knows names of replicas; what they hold and how busy they are the fleet hears from themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from kvarn.observe.logs import with_fields
from kvarn.server.ray.exchange import RayExchange
from kvarn.server.router.exchange import UpstreamFailed

log = logging.getLogger("kvarn.router")


class MembershipWatch:
    """Given to Ray's router with a call, and kept there; it does not travel to the replica."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[Sequence[str]], None]) -> None:
        self._loop = loop
        self._tell = tell

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __call__(self, replicas: Sequence[str]) -> None:
        """The names of all that run; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, tuple(replicas))


class UpstreamSeat:
    """The way to whichever replica has this seat. Exchanges that are new are feeds, which end when it is left."""

    def __init__(self, handle: Any) -> None:
        self.replica: str | None = None
        self._handle = handle
        self._is_taken = asyncio.Event()
        self._feeds: set[RayExchange] = set()
        self._asked: WeakSet[RayExchange] = WeakSet()

    async def take(self, *, is_new: bool = False) -> tuple[RayExchange, bool]:
        """An exchange with the replica; a feed waits for one."""
        if is_new:
            await self._is_taken.wait()
        if self.replica is None:
            raise UpstreamFailed("the replica has left", is_unreached=True)
        exchange = RayExchange(self._handle, self.replica)
        if is_new:
            self._feeds.add(exchange)
        else:
            self._asked.add(exchange)
        return exchange, False

    def give_back(self, exchange: RayExchange) -> None:
        exchange.abort()  # without effect on one that is complete

    def occupy(self, replica: str) -> None:
        self.replica = replica
        self._is_taken.set()

    def give_up_unanswered(self) -> None:
        """The replica, a frozen process, has fallen silent: what it has not begun to answer may go elsewhere."""
        for exchange in list(self._asked):
            if not exchange.has_begun:
                exchange.abort("the replica has fallen silent")

    def leave(self) -> None:
        """Nothing more is asked here; answers under way go on, and the replica ends when they do."""
        self.replica = None
        self._asked = WeakSet()  # of who comes next
        self._is_taken.clear()
        for feed in self._feeds:
            feed.abort("the replica leaves")
        self._feeds.clear()


class ReplicaSeats:
    """All seats of one deployment; more than replicas, as old and new ones overlap when they are replaced."""

    def __init__(self, handle: Any, number: int) -> None:
        self.seats = [UpstreamSeat(handle) for _ in range(number)]

    def update(self, replicas: Sequence[str]) -> None:
        """Take over who runs now."""
        for seat in self.seats:
            if seat.replica is not None and seat.replica not in replicas:
                seat.leave()
        seated = {seat.replica for seat in self.seats}
        vacant = [seat for seat in self.seats if seat.replica is None]
        for name, seat in zip([one for one in replicas if one not in seated], vacant, strict=False):
            seat.occupy(name)
        if unseated := len(set(replicas) - {seat.replica for seat in self.seats}):
            log.warning("replicas have no seat", extra=with_fields(replicas=unseated, seats=len(self.seats)))
