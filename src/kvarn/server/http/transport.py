"""The sending side of one connection: counts bytes, finds clients that do not read, closes so that refusals arrive."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvarn.server.http.limits import MIN_TAKEN_BYTES, ConnectionLimits
from kvarn.server.http.traffic import Traffic

NOTSENT_BYTES = 16 << 10  # the kernel buffers little that cannot be sent yet: the rest waits where it is counted
UNKNOWN_LENGTH = sys.maxsize
STREAM_GRACE_S = 1.0  # a stream's client may be max_buffered_bytes behind for this long
HEAD_WAIT_S = 0.05  # the head of a stream waits this long for its first event, to be sent with it

_OPTIONS = {
    # asyncio sets it only for sockets that name their protocol; without it each answer waits 40 ms for an
    # acknowledgement of its head.
    "TCP_NODELAY": 1,
    "TCP_NOTSENT_LOWAT": NOTSENT_BYTES,
    # A client that is gone without a FIN is noticed after 60 + 4 * 15 s, although nothing is being sent to it.
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 15,
    "TCP_KEEPCNT": 4,
}


class CountingTransport(asyncio.Transport):
    """Wraps the event loop's transport. close() is left to on_close: at once, or after lingering."""

    __slots__ = ("_beneath", "_flush", "_held", "_inner", "_is_half_closed", "_on_close", "_traffic", "num_written")

    def __init__(self, inner: asyncio.Transport, on_close: Callable[[], None], traffic: Traffic) -> None:
        super().__init__()
        self._inner = inner
        # Under TLS the event loop has a second buffer, of encrypted bytes, and no public way to it.
        self._beneath: asyncio.Transport | None = getattr(getattr(inner, "_ssl_protocol", None), "_transport", None)
        self._on_close = on_close
        self._traffic = traffic
        self._is_half_closed = False
        self._held = b""
        self._flush: asyncio.TimerHandle | None = None  # what was written last waits for more until then
        self.num_written = 0
        _tune(inner.get_extra_info("socket"))

    @property
    def num_unsent(self) -> int:
        """Bytes that the client has not taken yet, without those in the kernel's buffer."""
        size = self._inner.get_write_buffer_size() + len(self._held)
        return size if self._beneath is None else size + self._beneath.get_write_buffer_size()

    @property
    def num_taken(self) -> int:
        return self.num_written - self.num_unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            return
        self.num_written += len(data)
        self._traffic.num_sent_bytes += len(data)
        if self._flush is None:
            self._inner.write(data)
            return
        is_head = not self._held
        self._held += data
        if not is_head:
            self.flush()

    def hold_head(self) -> None:
        """Send what is written next with what is written then, or soon by itself: every call of the system counts."""
        if self._flush is None and not self.is_closing():
            self._flush = asyncio.get_running_loop().call_later(HEAD_WAIT_S, self.flush)

    def flush(self) -> None:
        """Send what is held."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
            held, self._held = self._held, b""
            if held:
                self._inner.write(held)

    def close(self) -> None:
        self._on_close()

    def close_now(self) -> None:
        """Send what is written, then close; a client that still sends may lose it."""
        self.flush()
        self._inner.close()

    def half_close(self) -> None:
        """Send what is written and a FIN, and go on reading: closing now could reset what is under way.

        TLS has no half of a connection: there the response's length and `connection: close` tell the client.
        """
        if self._is_half_closed or self._inner.is_closing():
            return
        self.flush()
        self._is_half_closed = True
        if self._inner.can_write_eof():
            self._inner.write_eof()

    def abort(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush, self._held = None, b""
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._is_half_closed or self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()


class SlowReaderCheck:
    """Whether a client reads: all that waits, or MIN_TAKEN_BYTES of it, within each write_timeout_s."""

    __slots__ = ("_began_at", "_goal", "_limits", "_transport")

    def __init__(self, transport: CountingTransport, limits: ConnectionLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._began_at: float | None = None  # of the current write_timeout_s; None: nothing waits
        self._goal = 0

    def is_stuck(self, now: float) -> bool:
        """Called at every tick."""
        if not self._transport.num_unsent:
            self._began_at = None
            return False
        taken = self._transport.num_taken
        if self._began_at is None or taken >= self._goal:
            self._began_at = now
            self._goal = min(self._transport.num_written, taken + MIN_TAKEN_BYTES)
            return False
        return now - self._began_at > self._limits.write_timeout_s


def end_with_connection(cycle: RequestResponseCycle) -> None:
    """Send no chunks, which HTTP/1.0 does not know: a response without a length ends where its connection does."""
    send = cycle.send

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding = False
                cycle.expected_content_length = UNKNOWN_LENGTH
        elif message["type"] == "http.response.body" and is_stream(cycle):
            # uvicorn counts down to the end of the response: only its last piece may have an end.
            has_more = message.get("more_body", False)
            cycle.expected_content_length = UNKNOWN_LENGTH if has_more else len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def is_stream(cycle: RequestResponseCycle) -> bool:
    """Whether the response grows while it is sent."""
    return bool(cycle.chunked_encoding) or cycle.expected_content_length > UNKNOWN_LENGTH // 2


def _tune(connection: socket.socket | None) -> None:
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # it may be closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            if hasattr(socket, name):  # not every system has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
