"""All connections of one server: how many there may be, who makes room for a new one, and one timer for all deadlines.

When there are too many, in all or of one address, the one that has waited longest for its client is closed, of the
address that has most of those. While all are busy, a few more are taken for health probes; other requests are refused.

No timer per connection and none per byte: a connection stores its deadline, and one tick at least each second compares
all of them with the time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvarn.server.http.limits import MAX_BODIES, ConnectionLimits
from kvarn.server.http.traffic import Traffic

if TYPE_CHECKING:
    from kvarn.server.http.connection_end import ConnectionEnd

# `backlog` of uvicorn.Config: asyncio accepts so many connections in one turn of its loop. More would mean, after
# a burst, thousands of new ones before any other callback runs, and before one too many can be closed.
ACCEPTED_PER_TURN = 16
WAITING = 2048  # held by the kernel
MIN_WAITED_S = 0.1  # before a connection makes room: the request of a new one may have come and not been read yet
LOCAL = ""  # the address of a peer that has none, such as a Unix socket's: it is not limited


class Listener(socket.socket):
    """The listening socket: its backlog is at least WAITING, whatever listen() is called with."""

    file: tuple[Path, int, int] | None = None  # of a Unix socket: where it is, its device and inode

    def listen(self, backlog: int = WAITING, /) -> None:
        super().listen(max(backlog, WAITING))


class Connections:
    """Shared by the connections of one event loop; made by make_protocol()."""

    def __init__(self, limits: ConnectionLimits, closes: Callable[[], bool], traffic: Traffic) -> None:
        """closes: whether each response is now the last of its connection."""
        self.limits = limits
        self.closes = closes
        self.traffic = traffic
        self.on_made: Callable[[asyncio.BaseTransport], None] = _ignore  # TLS is told when its handshake is over
        self.num_body_bytes = 0  # received for requests that are not answered yet
        self._open: set[ConnectionEnd] = set()
        self._overflow: dict[ConnectionEnd, None] = {}  # beyond the limit, the oldest first
        self._num_of: Counter[str] = Counter()  # open ones, by address
        # Those that wait until their client sends something, by address, the longest wait first.
        self._waiting: dict[str, dict[ConnectionEnd, float]] = {}  # since loop.time()
        self._tick: asyncio.TimerHandle | None = None

    @property
    def has_room_for_bodies(self) -> bool:
        return self.num_body_bytes <= MAX_BODIES * self.limits.max_body_bytes

    def admit(self, connection: ConnectionEnd) -> bool:
        """Count a new connection; False: too many are busy already, and this one may only ask for the health."""
        self._schedule(connection.loop)
        if not self._has_room(connection.address):
            self._overflow[connection] = None
            return False
        self._open.add(connection)
        self._num_of[connection.address] += 1
        self.traffic.num_accepted += 1
        self.traffic.num_open = len(self._open)
        self.wait_for_client(connection)
        return True

    def has_overflow_room(self) -> bool:
        """Whether the newest connection beyond the limit may stay for a moment; the oldest silent one goes for it."""
        if len(self._overflow) > self.limits.max_overflow:
            oldest = next((one for one in self._overflow if one.awaits_client), None)
            if oldest is None:
                return False
            del self._overflow[oldest]
            oldest.make_room()
        return True

    def wait_for_client(self, connection: ConnectionEnd) -> None:
        """From now on the client has to send something."""
        if connection in self._open:
            waiting = self._waiting.setdefault(connection.address, {})
            waiting.pop(connection, None)
            waiting[connection] = connection.loop.time()

    def serve(self, connection: ConnectionEnd) -> None:
        """From now on the server has to act, so that this connection makes room for no other."""
        waiting = self._waiting.get(connection.address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(connection.address, None)

    def remove(self, connection: ConnectionEnd) -> None:
        self._overflow.pop(connection, None)
        if connection not in self._open:
            return
        self.serve(connection)
        self._open.remove(connection)
        self._num_of[connection.address] -= 1
        if not self._num_of[connection.address]:
            del self._num_of[connection.address]
        self.traffic.num_open = len(self._open)

    def _has_room(self, address: str) -> bool:
        """Whether one more connection of an address may be open, after another one has made room if need be."""
        if address != LOCAL and self._num_of[address] >= self.limits.max_connections_per_address:
            return self._evict(address)
        if len(self._open) < self.limits.max_connections:
            return True
        return bool(self._waiting) and self._evict(max(self._waiting, key=lambda one: len(self._waiting[one])))

    def _evict(self, address: str) -> bool:
        """Close the connection of an address that has waited longest for its client; False if none waits long."""
        oldest, since = next(iter(self._waiting.get(address, {}).items()), (None, 0.0))
        if oldest is None or oldest.loop.time() - since < MIN_WAITED_S:
            return False
        self.remove(oldest)
        self.traffic.num_evicted += 1
        oldest.make_room()
        return True

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._tick is None:
            self._tick = loop.call_later(self.limits.tick_s, self._check_deadlines, loop)

    def _check_deadlines(self, loop: asyncio.AbstractEventLoop) -> None:
        self._tick = None
        now = loop.time()
        for connection in [*self._open, *self._overflow]:
            connection.check_deadlines(now)
        if self._open or self._overflow:
            self._schedule(loop)


def _ignore(_: asyncio.BaseTransport) -> None:
    pass


def address_of(peer: object) -> str:
    """Whose connection it is: an IPv4 address, or the network of an IPv6 address, of which one host has many."""
    return _address(str(peer[0])) if isinstance(peer, tuple) else LOCAL


@lru_cache(1024)
def _address(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
