"""Server-sent events: a response that grows. Silence is filled with comments, so that proxies keep it open.

An error inside a stream is an event like any other, because the status code has been sent. Knows no generation: a
disconnect of the client ends the events that it iterates over.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvarn.server.failures import ClientGone, Failure, failure_of, report
from kvarn.server.http.transport import CountingTransport

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from kvarn.server.request_context import RequestContext

WRITE_CHUNK = "kvarn.write_chunk"  # in the scope of a server of ours, see chunk_writer()
HOLD_HEAD = "kvarn.hold_head"  # likewise, see head_holder()
EVENT_STREAM = "text/event-stream"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def _comment(words: str) -> bytes:
    return f": {words}\n\n".encode()


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How one API dialect writes what is no part of the answer."""

    error_event: Callable[[Failure], bytes]
    done: bytes = b""  # ends every stream whose client is still connected
    comment: Callable[[str], bytes] = _comment  # what fills silence
    media_type: str = EVENT_STREAM


class EventStreamResponse(Response):
    """Streams without a task group: a task of its own writes events, the request's fills silence with comments.

    That of the request is many coroutines deep, and each would be resumed for every event.
    """

    def __init__(
        self,
        request: RequestContext,
        events: AsyncIterator[bytes],
        format: StreamFormat,
        *,
        comment: Callable[[], str],
        ping_s: float,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        """events: each a whole number of `data: ...` blocks; comment: sent after ping_s without an event.

        is_over: whether nothing is waited for any more; the events that are left, and the end, are then sent in one
        piece, since a piece costs as much as a hundred bytes take to make.
        """
        super().__init__(headers={**HEADERS, **request.headers}, media_type=format.media_type)
        del self.headers["content-length"]
        self._request_id = request.id
        self._given = request.given
        self._log_fields = request.log_fields
        self._events = events
        self._format = format
        self._comment = comment
        self._ping_s = ping_s
        self._is_over = is_over or (lambda: False)
        self._written_at = time.monotonic()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        scope.get(HOLD_HEAD, _nothing)()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        writing = asyncio.create_task(self._write_events(send, scope.get(WRITE_CHUNK, _never)))
        try:
            await self._ping_beside(writing, send)
            last = await writing
        finally:
            writing.cancel()  # without effect on one that has ended
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write_events(self, send: Send, write: Callable[[bytes], bool]) -> bytes:
        """Send events as they come; returns the bytes that end the stream."""
        left = b""
        try:
            async for data in self._events:
                if self._is_over():
                    left += data
                    continue
                self._written_at = time.monotonic()
                if not write(data):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            return b""
        except Exception as error:
            failure = failure_of(error, self._given)
            report(error, self._request_id)
            self._log_fields.update(failure.log_fields)
            return left + self._format.error_event(failure) + self._format.done
        return left + self._format.done

    async def _ping_beside(self, writing: asyncio.Task[bytes], send: Send) -> None:
        """Send a comment after every ping_s without an event, until the last one is written."""
        while not writing.done():
            silent_s = time.monotonic() - self._written_at
            if silent_s < self._ping_s:
                await asyncio.wait({writing}, timeout=self._ping_s - silent_s)
                continue
            self._written_at = time.monotonic()
            comment = self._format.comment(self._comment())
            await send({"type": "http.response.body", "body": comment, "more_body": True})


def chunk_writer(cycle: RequestResponseCycle) -> Callable[[bytes], bool]:
    """What writes a piece of a growing response past the coroutines that send() is wrapped in.

    False: it did not, because the client is behind or gone, or takes no chunks; then send() knows what to do.
    """
    held = weakref.ref(cycle)  # the scope, which has the result, belongs to it

    def write(data: bytes) -> bool:
        cycle = held()
        if cycle is None or cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write


def head_holder(cycle: RequestResponseCycle) -> Callable[[], None]:
    """What has the head of a growing response wait a moment for its first event, and go out in one piece with it."""
    held = weakref.ref(cycle)  # as above

    def hold_head() -> None:
        cycle = held()
        if cycle is not None and isinstance(cycle.transport, CountingTransport):
            cycle.transport.hold_head()

    return hold_head


def _never(_: bytes) -> bool:
    return False


def _nothing() -> None:
    pass
