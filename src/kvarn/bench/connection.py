"""A lean HTTP client for measuring: raw sockets, one exchange at a time per connection, event streams not decoded.

It shares the machine with the server it measures, so it parses no JSON but errors and usage. Knows HTTP and the
shape of OpenAI's event streams; knows no load.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from kvarn.errors import ConfigError, RequestError

MAX_KEPT_BYTES = 1 << 20  # of an answer that is not a stream, or of one event
CONNECT_TIMEOUT_S = 30.0
# Text that is not empty, in an event of a chat or of a plain completion.
_HAS_TEXT = re.compile(rb'"(?:content|text|reasoning_content|arguments)"\s*:\s*"(?!")')
_HAS_USAGE_OR_ERROR = re.compile(rb'"(?:usage"\s*:\s*\{|error"\s*:\s*[{"])')


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    prefix: str  # of every path: "" or what a proxy adds
    is_secure: bool

    @classmethod
    def of(cls, url: str) -> Address:
        """Read a base URL; a trailing /v1 is what clients of OpenAI are given, and means the same."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
            (parts.hostname or "").encode("idna")  # as the name is looked up; UnicodeError is a ValueError
        except ValueError as error:
            raise ConfigError(f"url is {url!r:.80} ({error}); give one such as http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"url is {url!r:.80}; give one such as http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        is_secure = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_secure else 80), prefix, is_secure)

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.is_secure else 80) else f"{name}:{self.port}"


@dataclass(slots=True)
class Exchange:
    """What came back for one request, with times of time.perf_counter()."""

    sent_at: float
    status: int = 0
    retry_after_s: float | None = None
    first_at: float | None = None  # the first event with text
    last_at: float = 0.0  # the last event with text
    ended_at: float = 0.0
    num_events: int = 0  # with text; one may carry several tokens
    gaps: list[float] = field(default_factory=list)  # between them, in seconds
    usage: dict[str, Any] | None = None
    error: str | None = None
    is_done: bool = False  # [DONE] was seen
    body: bytes = b""  # of an answer that is not a stream

    def take(self, event: bytes, now: float) -> None:
        """Record one event of the stream."""
        if not event.startswith(b"data:"):
            return  # a comment that keeps the connection open
        data = event[5:].strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        if _HAS_TEXT.search(data):
            self._count_event(now)
        if _HAS_USAGE_OR_ERROR.search(data):
            self._read_usage_or_error(data)

    def _count_event(self, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
        else:
            self.gaps.append(now - self.last_at)
        self.last_at = now
        self.num_events += 1

    def _read_usage_or_error(self, data: bytes) -> None:
        try:
            chunk = json.loads(data)
        except ValueError:
            self.error = "an event is not JSON"
            return
        if chunk.get("error"):
            self.error = error_text(chunk)
        self.usage = chunk.get("usage") or self.usage


class Connection(asyncio.Protocol):
    """One connection, kept open between exchanges."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._is_stream = False
        self._rest = b""
        self._now = 0.0

    @classmethod
    async def open(cls, address: Address) -> Connection:
        loop = asyncio.get_running_loop()
        secure = ssl.create_default_context() if address.is_secure else None
        connecting = loop.create_connection(cls, address.host, address.port, ssl=secure)
        _, connection = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        return connection

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, timeout_s: float) -> Exchange:
        """Send one request and wait for the end of its answer; OSError and TimeoutError when that does not come."""
        assert self._transport is not None
        self._exchange = Exchange(time.perf_counter())
        self._ended = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._is_stream, self._rest = False, b""
        self._transport.write(request)
        try:
            await asyncio.wait_for(self._ended, timeout_s)
        except BaseException:
            self.close()
            raise
        return self._exchange

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio:

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._end(error or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():
            self.close()  # bytes without a request
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"the answer is not HTTP: {error}"))
            self.close()

    # Called by the parser:

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._exchange is not None
        lower = name.lower()
        if lower == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")
        elif lower == b"retry-after" and value.isdigit():
            self._exchange.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        assert self._exchange is not None
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._exchange is not None
        if not self._is_stream:
            self._exchange.body = (self._exchange.body + body)[:MAX_KEPT_BYTES]
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            self._exchange.take(event.lstrip(b"\r\n"), self._now)
        self._rest = self._rest[-MAX_KEPT_BYTES:]

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is not None:
            self._ended.set_exception(error)
            return
        assert self._exchange is not None
        self._exchange.ended_at = self._now
        self._ended.set_result(None)


def request_bytes(
    address: Address, method: str, path: str, *, key: str | None = None, body: dict[str, Any] | None = None
) -> bytes:
    """A whole HTTP request."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"host: {address.host_header}", "user-agent: kvarn-bench"]
    if key:
        lines.append(f"authorization: Bearer {key}")
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


def error_text(body: Any) -> str:
    """The message of an error body of OpenAI's shape; of another body, what looks most like one."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:300]


async def first_model(address: Address, key: str | None, timeout_s: float) -> str:
    """The id of the first model a server lists."""
    try:
        connection = await Connection.open(address)
        try:
            answer = await connection.exchange(request_bytes(address, "GET", "/v1/models", key=key), timeout_s)
        finally:
            connection.close()
    except OSError as error:
        reason = error.strerror or str(error) or "it took too long"
        raise RequestError(f"{address.host_header} did not answer: {reason}; is a server running there?") from None
    try:
        body = json.loads(answer.body)
        if answer.status == 200:
            return str(body["data"][0]["id"])
        reason = error_text(body)
    except (ValueError, LookupError, TypeError):
        reason = "the answer is not a list of models"
    raise RequestError(f"the server does not tell its models (status {answer.status}: {reason}); give --model")
