"""Replicas by name: all addresses of one DNS name, such as a headless service of Kubernetes, looked up again and again.

Each address has a seat while it is there. One that the name does not have any more keeps its seat as long as it speaks:
a replica that ends its answers has left the name before. Knows addresses; what replicas hold they tell themselves.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from kvarn.observe.logs import with_fields
from kvarn.routing.fleet import Fleet
from kvarn.server.router.exchange import UpstreamFailed
from kvarn.server.router.upstream import ConnectionPool, ReplicaAddress, UpstreamConnection

log = logging.getLogger("kvarn.router")
LOOK_UP_S = 2.0  # between two questions: of Kubernetes' DNS the answers are good for 5 to 30 s
NAME_TIMEOUT_S = 5.0

LookUp = Callable[[ReplicaAddress], Awaitable[Sequence[str]]]


async def addresses_of(name: ReplicaAddress) -> Sequence[str]:
    """All addresses of a host name; OSError where it has none, or nobody knows."""
    loop = asyncio.get_running_loop()
    asking = loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    found = await asyncio.wait_for(asking, NAME_TIMEOUT_S)
    return sorted({str(one[4][0]) for one in found})


class DiscoveredSeat:
    """The way to whichever replica has this seat; like ConnectionPool, with nobody there at times."""

    def __init__(self) -> None:
        self.pool: ConnectionPool | None = None
        self._is_taken = asyncio.Event()
        self._taken: WeakSet[UpstreamConnection] = WeakSet()  # of the pool that is here

    async def take(self, *, is_new: bool = False) -> tuple[UpstreamConnection, bool]:
        """A connection; a feed, which wants a new one, waits for a replica."""
        if is_new:
            await self._is_taken.wait()
        pool = self.pool
        if pool is None:
            raise UpstreamFailed("the replica has left", is_unreached=True)
        connection, was_used = await pool.take(is_new=is_new)
        if pool is not self.pool:  # it has left meanwhile, and another may be here
            connection.abort()
            raise UpstreamFailed("the replica has left", is_unreached=True)
        self._taken.add(connection)
        return connection, was_used

    def give_back(self, connection: Any) -> None:
        """Its exchange is complete."""
        if self.pool is not None and connection in self._taken:
            self.pool.give_back(connection)
        else:
            connection.abort()  # of who was here before

    def give_up_silent(self) -> None:
        if self.pool is not None:
            self.pool.give_up_silent()

    def occupy(self, address: ReplicaAddress) -> None:
        self.pool = ConnectionPool(address)
        self._is_taken.set()

    def leave(self) -> None:
        """Nothing more is asked here; answers under way go on."""
        if self.pool is not None:
            self.pool.close()
        self.pool, self._taken = None, WeakSet()
        self._is_taken.clear()

    def close(self) -> None:
        self.leave()


class Discovery:
    """The seats of one name. For one event loop."""

    def __init__(self, name: ReplicaAddress, num_seats: int, look_up: LookUp = addresses_of) -> None:
        self.seats = [DiscoveredSeat() for _ in range(num_seats)]
        self.names = [f"{name.host}/{number}" for number in range(num_seats)]
        self._name = name
        self._look_up = look_up
        self._told = ""

    @property
    def taken(self) -> list[int]:
        """The numbers of seats that are."""
        return [number for number, seat in enumerate(self.seats) if seat.pool is not None]

    async def watch(self, fleet: Fleet) -> None:
        """Follow the name for ever."""
        while True:
            await self.look(fleet)
            await asyncio.sleep(LOOK_UP_S)

    async def look(self, fleet: Fleet) -> None:
        """Ask once; without an answer everything stays as it is."""
        try:
            found = await self._look_up(self._name)
        except (OSError, TimeoutError) as error:
            self._tell(f"{self._name.host} has no address: {error or type(error).__name__}")
            return
        self._tell("")
        self.update(fleet, found)

    def update(self, fleet: Fleet, found: Iterable[str]) -> None:
        """Take over the addresses of now."""
        wanted = {self._at(one).url: self._at(one) for one in found}
        for number in self.taken:
            url = fleet.replicas[number].address
            if url not in wanted and fleet.replicas[number].identity is None:  # gone, and says nothing
                self.seats[number].leave()
                fleet.place(number, None)
            wanted.pop(url or "", None)
        vacant = [number for number, seat in enumerate(self.seats) if seat.pool is None]
        for number, (url, address) in zip(vacant, sorted(wanted.items()), strict=False):
            self.seats[number].occupy(address)
            fleet.place(number, url)
            log.info("a replica was found", extra=with_fields(replica=self.names[number], address=url))
        if len(wanted) > len(vacant):
            told = with_fields(replicas=len(wanted) - len(vacant), seats=len(self.seats))
            log.warning("replicas have no seat; raise --max-replicas", extra=told)

    def _at(self, host: str) -> ReplicaAddress:
        shown = f"[{host}]" if ":" in host else host
        scheme = "https" if self._name.is_secure else "http"
        url = f"{scheme}://{shown}:{self._name.port}"
        return replace(self._name, url=url, host=host, server_name=self._name.host)

    def _tell(self, words: str) -> None:
        if words and words != self._told:
            log.warning("no replica is looked up", extra=with_fields(reason=words))
        self._told = words
