"""When a request is no longer needed: its deadline has passed, or its client is gone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.types import Receive

from kvarn.errors import DeadlineExceeded
from kvarn.server.failures import ClientGone


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request must have ended."""

    received_at: float  # time.monotonic()
    timeout_s: float

    @property
    def left_s(self) -> float:
        return self.timeout_s - (time.monotonic() - self.received_at)

    def error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request did not end within {self.timeout_s:g} s; ask for less, or later")


async def client_gone(receive: Receive) -> ClientGone:
    """Wait until the client disconnects. The body has been read: no other message can still come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGone("the client closed the connection")
