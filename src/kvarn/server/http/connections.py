"""All connections of one server: how many there may be, and one timer that checks every deadline.

No timer per connection and none per byte: a connection stores its deadline, and one tick at least each second compares
all of them with the time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarn.server.http.limits import MAX_BODIES, ConnectionLimits
from kvarn.server.http.traffic import Traffic

if TYPE_CHECKING:
    from kvarn.server.http.connection_end import ConnectionEnd

# `backlog` of uvicorn.Config: asyncio accepts so many connections in one turn of its loop. More would mean, after
# a burst, thousands of new ones before any other callback runs, and before one too many can be closed.
ACCEPTED_PER_TURN = 16
WAITING = 2048  # held by the kernel


class Listener(socket.socket):
    """The listening socket: its backlog is at least WAITING, whatever listen() is called with."""

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
        self._overflow: set[ConnectionEnd] = set()
        self._tick: asyncio.TimerHandle | None = None

    @property
    def has_room_for_bodies(self) -> bool:
        return self.num_body_bytes <= MAX_BODIES * self.limits.max_body_bytes

    def admit(self, connection: ConnectionEnd) -> bool:
        """Count a new connection; False: there are too many already, and it is only sent a refusal."""
        self._schedule(connection.loop)
        if len(self._open) < self.limits.max_connections:
            self._open.add(connection)
            self.traffic.num_accepted += 1
            self.traffic.num_open = len(self._open)
            return True
        self.traffic.num_refused += 1
        self._overflow.add(connection)
        return False

    @property
    def has_overflow_room(self) -> bool:
        """Whether a connection beyond the limit may stay for a moment, to read the refusal and send what is dropped."""
        return len(self._overflow) <= self.limits.max_overflow

    def remove(self, connection: ConnectionEnd) -> None:
        self._open.discard(connection)
        self.traffic.num_open = len(self._open)
        self._overflow.discard(connection)

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
