"""A request on its way through a router: to the replica that is chosen, and its answer back as it comes.

Before the first byte of an answer another replica may be asked; after it, an answer that breaks off ends with an error
of its dialect. Keys pass through unread: replicas know them. Whoever leaves ends the exchange with the replica, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvarn.errors import KvarnError
from kvarn.routing.choice import bits
from kvarn.routing.cluster_key import ClusterKey
from kvarn.routing.feed import MARKS_HEADER, PROOF_HEADER
from kvarn.routing.fleet import Fleet, RoutedRequest
from kvarn.routing.text_prefix import TextHasher, write_marks
from kvarn.server.failures import NoReplica, ReplicaLost, failure_of
from kvarn.server.http.disconnect import client_gone
from kvarn.server.http.json_body import read_bytes
from kvarn.server.http.sse import WRITE_CHUNK
from kvarn.server.process.lifecycle import ShuttingDown
from kvarn.server.process.settings import ServerConfig
from kvarn.server.router.exchange import Headers, Upstream, UpstreamExchange, UpstreamFailed, UpstreamRequest
from kvarn.server.router.metrics import RouterMetrics
from kvarn.server.router.routed_body import RoutedBody, asked_tag
from kvarn.server.router.stream_end import StreamTail, last_event

HOP_HEADERS = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"host", b"content-length"),
        *(MARKS_HEADER.encode(), PROOF_HEADER.encode()),
    }
)
HOP_ANSWER_HEADERS = frozenset(
    {b"date", b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
UNAVAILABLE = 503
RETRY_AFTER_S = 1.0


class Forwarder:
    """Hands requests to replicas. For one event loop."""

    def __init__(
        self, fleet: Fleet, pools: Sequence[Upstream], key: ClusterKey, config: ServerConfig, metrics: RouterMetrics
    ) -> None:
        self._fleet = fleet
        self._pools = pools
        self._key = key
        self._hasher = TextHasher(key)
        self._config = config
        self._metrics = metrics
        self._asked: set[UpstreamExchange] = set()
        self._is_ending = False

    def end_all(self) -> None:
        """The deadline of a drain: what is still under way ends with an error."""
        self._is_ending = True
        for connection in list(self._asked):
            connection.abort("the router is shutting down")

    def knows(self, path: str) -> bool:
        """Whether a path asks about a request of one of these replicas."""
        tag = asked_tag(path)
        return tag is not None and self._fleet.tags.of(tag) != 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; refusals are raised before the first byte."""
        data = await read_bytes(Request(scope, receive), self._config.max_body_bytes)
        await self.forward(scope, data, receive, send)

    async def forward(self, scope: Scope, data: bytes, receive: Receive, send: Send) -> None:
        """Answer one whose body has been read."""
        request = RoutedBody.read(scope, data, self._hasher)
        gone = asyncio.ensure_future(client_gone(receive))
        try:
            await self._forward(request, gone, send)
        finally:
            gone.cancel()

    async def _forward(self, request: RoutedBody, gone: asyncio.Future[Any], send: Send) -> None:
        """Ask one replica after another until one answers."""
        tried = 0
        while True:
            routed = self._route(request, tried)
            number = routed.choice.replica
            connection: UpstreamExchange | None = None
            try:
                connection = await self._ask(request, number, gone)
                if connection.status != UNAVAILABLE or not self._fleet.usable & ~(tried | 1 << number):
                    self._fleet.answer(routed)
                    await self._answer(request, number, connection, gone, send)
                    return
                self._metrics.retried("refused")
            except UpstreamFailed as error:
                if gone.done():
                    return
                self._fleet.fail(number)
                if connection is not None or (not request.may_repeat and not error.is_unreached):
                    raise ReplicaLost("the replica that answered is gone; ask again") from None
                self._metrics.retried("unreachable" if error.is_unreached else "lost")
            finally:
                self._fleet.end(routed)
                if connection is not None:
                    self._asked.discard(connection)
                    self._pools[number].give_back(connection)
            tried |= 1 << number

    def _route(self, request: RoutedBody, tried: int) -> RoutedRequest:
        began = time.perf_counter()
        usable = self._fleet.usable & ~tried
        if not usable:
            self._metrics.refused()
            raise NoReplica("no replica can be asked now; try again in a moment", retry_after_s=RETRY_AFTER_S)
        usable = self._only(request, usable)
        _, routed = self._fleet.route(request.prefix, usable, len(request.body))
        self._metrics.chose(routed.choice, time.perf_counter() - began)
        return routed

    def _only(self, request: RoutedBody, usable: int) -> int:
        """Of the usable replicas those that can answer: one where only one knows what is asked for."""
        fleet = self._fleet
        for tag in request.tags:
            if holders := fleet.tags.of(tag) & usable:
                return holders
        if request.name is not None:
            name = request.name
            meant = (name, name.removesuffix(":latest"), f"{name}:latest")
            offering = next(filter(None, map(fleet.names.of, meant)), 0)
            usable = offering & usable or usable
        is_homed = request.is_homed or (request.is_mixed and not fleet.names.are_same(usable))
        return 1 << self._home(request.credential, usable) if is_homed else usable

    def _home(self, credential: bytes, usable: int) -> int:
        """The same replica for the same key, and for few keys another one when one comes or goes."""

        def weight(number: int) -> bytes:
            one = self._fleet.replicas[number]
            return blake2b(credential, key=(one.address or one.name).encode()[:64]).digest()

        return max(bits(usable), key=weight)

    async def _ask(self, request: RoutedBody, number: int, gone: asyncio.Future[Any]) -> UpstreamExchange:
        """Send the request and wait for the head of the answer, once more where a kept connection was old."""
        pool = self._pools[number]
        message = self._message(request)
        connection: UpstreamExchange
        connection, was_used = await pool.take()
        while True:
            self._asked.add(connection)
            gone.add_done_callback(partial(_abort, connection))
            began = time.perf_counter()
            try:
                await connection.begin(message)
                self._metrics.answered(number, time.perf_counter() - began)
                return connection
            except UpstreamFailed as error:
                self._asked.discard(connection)
                if not was_used or connection.has_begun or error.is_silent or gone.done():
                    raise
            except asyncio.CancelledError:
                self._asked.discard(connection)
                connection.abort()
                raise
            connection, was_used = await pool.take(is_new=True)

    def _message(self, request: RoutedBody) -> UpstreamRequest:
        scope = request.scope
        given: Headers = scope["headers"]
        named = {one.strip().lower() for name, value in given if name == b"connection" for one in value.split(b",")}
        headers = [(name, value) for name, value in given if name not in HOP_HEADERS and name not in named]
        client = scope.get("client")
        headers += [(b"via", b"1.1 kvarn"), (b"x-forwarded-for", str(client[0] if client else "unix").encode())]
        if request.prefix is not None:
            headers.append((MARKS_HEADER.encode(), write_marks(self._key, request.prefix.marks())))
        if request.body or scope["method"] not in ("GET", "HEAD"):
            headers.append((b"content-length", str(len(request.body)).encode()))
        target = scope["path"].encode() if not scope.get("raw_path") else scope["raw_path"].partition(b"?")[0]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        return UpstreamRequest(scope["method"], target + query, headers, request.body, client)

    async def _answer(
        self, request: RoutedBody, number: int, connection: UpstreamExchange, gone: asyncio.Future[Any], send: Send
    ) -> None:
        """Pass the answer on as it comes."""
        headers = [(name, value) for name, value in connection.headers if name not in HOP_ANSWER_HEADERS]
        known = dict(headers)
        tail = StreamTail.of(known.get(b"content-type", b"")) if connection.status == 200 else None
        headers.append((b"x-kvarn-replica", str(number).encode()))
        if connection.status == 200 and request.offers is not None:
            self._fleet.names.add(number, request.offers)  # it tells so itself, but the client may ask before
        await send({"type": "http.response.start", "status": connection.status, "headers": headers})
        write = request.scope.get(WRITE_CHUNK, _never)
        try:
            while data := await connection.read():
                if (tail is None or (data := tail.push(data))) and not (tail is not None and write(data)):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = b"" if tail is None else tail.rest
        except UpstreamFailed:
            if gone.done():
                return
            error = self._lost(number)
            if tail is None:
                raise error from None  # the connection is cut
            last = last_event(request.path, failure_of(error), tail.last)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _lost(self, number: int) -> KvarnError:
        """Why an answer broke off."""
        if self._is_ending:
            return ShuttingDown()
        self._fleet.fail(number)
        self._metrics.lost(number)
        return ReplicaLost("the replica that answered is gone; ask again, another one will")


def _never(_: bytes) -> bool:
    return False


def _abort(connection: UpstreamExchange, _: asyncio.Future[Any]) -> None:
    connection.abort("the client is gone")
