"""Server-sent events: a response that grows. Silence is filled with comments, so that proxies keep it open.

An error inside a stream is an event like any other, because the status code has been sent. Knows no generation: a
disconnect of the client ends the events that it iterates over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvarn.server.failures import ClientGone, Failure, failure_of, report

if TYPE_CHECKING:
    from kvarn.server.request_context import RequestContext

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How one API dialect writes what is no part of the answer."""

    error_event: Callable[[Failure], bytes]
    done: bytes = b""  # ends every stream whose client is still connected


class EventStreamResponse(Response):
    """Streams without a task group: one task writes events as they come, one fills silence with comments."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request: RequestContext,
        events: AsyncIterator[bytes],
        format: StreamFormat,
        *,
        comment: Callable[[], str],
        ping_s: float,
    ) -> None:
        """events: each a whole number of `data: ...` blocks; comment: sent after ping_s without an event."""
        super().__init__(headers={**HEADERS, **request.headers}, media_type=self.media_type)
        del self.headers["content-length"]
        self._request_id = request.id
        self._given = request.given
        self._log_fields = request.log_fields
        self._events = events
        self._format = format
        self._comment = comment
        self._ping_s = ping_s
        self._written_at = time.monotonic()

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pings = asyncio.create_task(self._ping(send))
        try:
            last = await self._write_events(send)
        finally:
            pings.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write_events(self, send: Send) -> bytes:
        """Send events as they come; returns the bytes that end the stream."""
        try:
            async for data in self._events:
                self._written_at = time.monotonic()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            return b""
        except Exception as error:
            failure = failure_of(error, self._given)
            report(error, self._request_id)
            self._log_fields.update(failure.log_fields)
            return self._format.error_event(failure) + self._format.done
        return self._format.done

    async def _ping(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._written_at
            if silent_s < self._ping_s:
                await asyncio.sleep(self._ping_s - silent_s)
                continue
            self._written_at = time.monotonic()
            comment = f": {self._comment()}\n\n".encode()
            await send({"type": "http.response.body", "body": comment, "more_body": True})
