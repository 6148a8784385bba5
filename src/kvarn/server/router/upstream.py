"""Connections to replicas: one exchange at a time each, kept open between them, bodies handed on as they come.

Knows HTTP/1.1 as a client; never looks into a body.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import httptools

from kvarn.errors import ConfigError
from kvarn.routing.fleet import SILENT_S
from kvarn.server.router.exchange import Headers, UpstreamFailed, UpstreamRequest

CONNECT_TIMEOUT_S = 2.0
IDLE_S = 30.0  # shorter than a server keeps an idle connection
MAX_IDLE = 64  # connections of one replica
MAX_UNREAD_BYTES = 256 << 10  # of a body whose reader is behind: the replica is then not read from


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Where a replica is."""

    url: str
    host: str
    port: int
    is_secure: bool
    server_name: str | None = None  # that its certificate is for, where that is not the host

    @classmethod
    def of(cls, url: str) -> ReplicaAddress:
        """Read a base URL; ConfigError for what is none."""
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as the name is looked up; UnicodeError is a ValueError
        except ValueError as error:
            raise ConfigError(f"replica is {url!r:.80} ({error}); give one such as http://10.0.0.7:8000") from None
        is_plain = not (parts.query or parts.username or parts.fragment or parts.path.strip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise ConfigError(f"replica is {url!r:.80}; give scheme, host and port, as http://10.0.0.7:8000")
        is_secure = parts.scheme == "https"
        return cls(url.rstrip("/"), parts.hostname, port or (443 if is_secure else 80), is_secure)

    @property
    def host_header(self) -> bytes:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{name}:{self.port}".encode()


class UpstreamConnection(asyncio.Protocol):
    """One connection and the exchange that it is used for."""

    def __init__(self, host: bytes) -> None:
        self.status = 0
        self._host = host
        self.headers: Headers = []
        self.has_begun = False  # a byte of the response has come
        self.idle_since = 0.0
        self._heard_at = 0.0  # when a byte came last, or something was asked
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._parts: deque[bytes] = deque()
        self._num_unread = 0
        self._has_head = self._is_complete = False
        self._error: UpstreamFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_reusable(self) -> bool:
        """Whether its last exchange is complete and it can take another."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self._is_complete and not self._parts and self._error is None

    async def begin(self, request: UpstreamRequest) -> None:
        """Send a request and wait for the head of its response; UpstreamFailed when that does not come."""
        assert self._transport is not None
        self.status, self.headers, self.has_begun = 0, [], False
        self._has_head = self._is_complete = False
        self._heard_at = time.monotonic()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(_request_bytes(request, self._host))
        while not self._has_head:
            await self._next()

    async def read(self) -> bytes:
        """The next piece of the body; b"": that was all. UpstreamFailed when the connection breaks before."""
        while not self._parts:
            if self._is_complete:
                return b""
            await self._next()
        if len(self._parts) == 1:
            data = self._parts.popleft()
        else:
            data = b"".join(self._parts)
            self._parts.clear()
        if self._num_unread > MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
            self._heard_at = time.monotonic()  # nothing could be heard
        self._num_unread = 0
        return data

    def give_up_silent(self) -> None:
        """End an exchange whose replica has sent nothing for too long, though it was read from."""
        is_heard = self._num_unread > 0 or time.monotonic() - self._heard_at < SILENT_S
        if self._parser is not None and not self._is_complete and not is_heard:
            self.abort("the replica has fallen silent", is_silent=True)

    def abort(self, reason: str = "the connection was closed", *, is_silent: bool = False) -> None:
        """End the connection; who reads from it is told why."""
        self._fail(reason, is_silent=is_silent)
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio:

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self._is_complete:
            self._fail(f"the replica closed the connection: {error or 'without a word'}")

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._is_complete:
            self.abort("the replica sent what nobody asked for")
            return
        self.has_begun = True
        self._heard_at = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"the answer of a replica is not HTTP: {error}")

    # Called by the parser:

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # others announce what follows
        if not self._has_head:
            self.headers = []
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._num_unread += len(body)
        if self._num_unread > MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if not self._has_head:
            return
        self._is_complete = True
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self._wake()

    async def _next(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _fail(self, reason: str, *, is_silent: bool = False) -> None:
        if self._error is None:
            self._error = UpstreamFailed(reason, is_silent=is_silent)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ConnectionPool:
    """Idle connections to one replica."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address
        self._idle: list[UpstreamConnection] = []
        self._made: WeakSet[UpstreamConnection] = WeakSet()
        self._secure = ssl.create_default_context() if address.is_secure else None

    async def take(self, *, is_new: bool = False) -> tuple[UpstreamConnection, bool]:
        """A connection, and whether it was used before; is_new: it must not have been."""
        self._drop_old()
        while self._idle and not is_new:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection, True
        address = self.address
        connecting = asyncio.get_running_loop().create_connection(
            partial(UpstreamConnection, address.host_header),
            address.host,
            address.port,
            ssl=self._secure,
            server_hostname=address.server_name if address.is_secure else None,
        )
        try:
            _, connection = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            is_silent = isinstance(error, TimeoutError)
            message = f"{address.url} cannot be reached: {reason}"
            raise UpstreamFailed(message, is_unreached=True, is_silent=is_silent) from None
        self._made.add(connection)
        return connection, False

    def give_back(self, connection: UpstreamConnection) -> None:
        """Its exchange is complete."""
        if connection.is_reusable and len(self._idle) < MAX_IDLE:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()

    def give_up_silent(self) -> None:
        """The replica is frozen, or cut off: what waits for it is told so, and may go elsewhere."""
        for connection in list(self._made):
            connection.give_up_silent()

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _drop_old(self) -> None:
        now = time.monotonic()
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.pop(0).abort()


def _request_bytes(request: UpstreamRequest, host: bytes) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.target), b"host: " + host]
    lines += [name + b": " + value for name, value in request.headers]
    return b"\r\n".join([*lines, b"", request.body])
