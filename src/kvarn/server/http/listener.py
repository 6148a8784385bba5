"""The listening socket: many clients may wait for their connection, few get it at a time.

asyncio accepts as many connections in one turn of its loop as it has been told to let wait. After a burst that would be
thousands of new connections before anybody else's turn, and before one too many can be closed.
"""

from __future__ import annotations

import socket

ACCEPTED_PER_TURN = 16  # `backlog` of uvicorn.Config; it takes some turns to close one again
WAITING = 2048  # held by the system


class Listener(socket.socket):
    """A socket that lets WAITING clients wait, whatever it is told."""

    def listen(self, backlog: int = WAITING, /) -> None:
        super().listen(max(backlog, WAITING))
