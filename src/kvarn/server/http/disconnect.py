"""Wait for work only as long as somebody waits for its result and the server may give it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kvarn.errors import DeadlineExceeded
from kvarn.server.failures import ClientGone

if TYPE_CHECKING:
    from starlette.requests import Request

    from kvarn.server.call import Call

T = TypeVar("T")


async def while_awaited(call: Call, work: Coroutine[Any, Any, T]) -> T:
    """The result of work; cancelled with ClientGone, DeadlineExceeded or ShuttingDown when nobody needs it any more."""
    timeout_s = call.state.config.request_timeout_s
    left_s = timeout_s - (time.monotonic() - call.received_at)
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_goes_away(call.http))
    try:
        with call.state.lifecycle.ends_at_stop():
            await asyncio.wait({task, watch}, timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watch.done():
            raise ClientGone("the client closed the connection")
        raise DeadlineExceeded(f"the request did not end within {timeout_s:g} s; ask for less, or later")
    finally:
        watch.cancel()
        task.cancel()  # without effect on one that is done


async def _goes_away(http: Request) -> None:
    """The body has been read: all that may still come is this news."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
