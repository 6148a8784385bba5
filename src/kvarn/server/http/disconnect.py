"""Wait for work only as long as its result is needed: until the client disconnects, a deadline passes or we stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from kvarn.errors import DeadlineExceeded
from kvarn.server.failures import ClientGone

if TYPE_CHECKING:
    from kvarn.server.request_context import RequestContext

T = TypeVar("T")


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


async def while_awaited(request: RequestContext, work: Coroutine[Any, Any, T]) -> T:
    """The result of work; cancelled with ClientGone, DeadlineExceeded or ShuttingDown when it is no longer needed."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(client_gone(request.receive))
    try:
        with request.ends_at_stop():
            left_s = max(request.deadline.left_s, 0.0)
            await asyncio.wait({task, gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise gone.result()
        raise request.deadline.error()
    finally:
        gone.cancel()
        task.cancel()  # without effect on one that is done


async def client_gone(receive: Receive) -> ClientGone:
    """Wait until the client disconnects. The body has been read: no other message can still come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGone("the client closed the connection")
