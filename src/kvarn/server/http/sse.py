"""Server-sent events: a response that grows. Silence is filled with comments, so that proxies keep it open.

An error inside a stream is an event like any other, because the status code has been sent. The client going away is
noticed by the Generation, not here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvarn.server.failures import ClientGone, failure_body, report

if TYPE_CHECKING:
    from kvarn.server.call import Call

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
ErrorEvent = Callable[[BaseException], bytes]


def stream_response(
    call: Call, events: AsyncIterator[bytes], *, error_event: ErrorEvent | None = None, done: bytes = DONE
) -> Response:
    """A response of events as they come, each a whole number of `data: ...` blocks.

    error_event writes an exception; done ends every stream that the client waits for.
    """
    return EventStreamResponse(call, events, error_event or _openai_error, done)


class EventStreamResponse(Response):
    """Streams without a task group: one task writes, one fills silence."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, events: AsyncIterator[bytes], error_event: ErrorEvent, done: bytes) -> None:
        super().__init__(headers={**HEADERS, **call.headers}, media_type=self.media_type)
        del self.headers["content-length"]
        self._call = call
        self._events = events
        self._error_event = error_event
        self._done = done
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
        """Send what comes; returns what stands at the end."""
        try:
            async for data in self._events:
                self._written_at = time.monotonic()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            return b""
        except Exception as error:
            report(error, self._call.id)
            return self._error_event(error) + self._done
        return self._done

    async def _ping(self, send: Send) -> None:
        period_s = self._call.state.config.ping_s
        while True:
            silent_s = time.monotonic() - self._written_at
            if silent_s < period_s:
                await asyncio.sleep(period_s - silent_s)
                continue
            self._written_at = time.monotonic()
            await send({"type": "http.response.body", "body": self._comment(), "more_body": True})

    def _comment(self) -> bytes:
        generation = self._call.generation
        if generation is None:
            return b": waiting\n\n"
        done, total = generation.prompt_progress
        return f": {generation.phase}, {done} of {total} prompt tokens\n\n".encode()


def _openai_error(error: BaseException) -> bytes:
    return b"data: " + failure_body(error, "") + b"\n\n"
