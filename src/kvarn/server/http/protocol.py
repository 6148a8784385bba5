"""One connection: uvicorn's httptools protocol with deadlines, limits, and refusals that arrive.

    new ────────> head ──blank line──> body ──last byte──> answering ──last byte out──> idle ──first byte──> head
    header_timeout_s                   body_timeout_s      write_timeout_s              keep_alive_s

Whatever goes wrong before the application answers becomes a Refusal and the end of the connection. Knows HTTP; never
looks into a body.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from kvarn.server.http import refusals
from kvarn.server.http.connection_end import ConnectionEnd
from kvarn.server.http.connections import Connections
from kvarn.server.http.limits import MAX_PIPELINED, ConnectionLimits, fit_descriptors
from kvarn.server.http.refusals import Refusal, Refused
from kvarn.server.http.request_head import check_headers, read_target, without_prefix, without_upgrade
from kvarn.server.http.sse import HOLD_HEAD, WRITE_CHUNK, chunk_writer, head_holder
from kvarn.server.http.traffic import Traffic
from kvarn.server.http.transport import end_with_connection
from kvarn.server.process.lifecycle import Lifecycle, is_probe
from kvarn.server.process.settings import ServerConfig

log = logging.getLogger("kvarn.server.http")

MAX_QUEUED_BODY = 64 << 10  # of a request that waits until another one is answered


def make_protocol(config: ServerConfig, lifecycle: Lifecycle, traffic: Traffic) -> type[LimitedProtocol]:
    """The class that uvicorn makes one of for each connection: `uvicorn.Config(app, http=make_protocol(...))`.

    Raises this process's limit on open files if the connections would not fit.
    """
    limits = fit_descriptors(ConnectionLimits.of(config))
    connections = Connections(limits, lambda: lifecycle.closes_connections, traffic)
    members = {"connections_of_server": connections, "proxy_prefix": config.root_path}
    return type("ServerProtocol", (LimitedProtocol,), members)


class LimitedProtocol(ConnectionEnd):
    """make_protocol() makes the class that uvicorn uses."""

    proxy_prefix: ClassVar[str]  # under which a reverse proxy offers the server

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._is_idle = False  # between two requests
        self._wants_keep_alive = False  # the newest request does
        self._offers_upgrade = False

    def data_received(self, data: bytes) -> None:
        self._connections.traffic.num_received_bytes += len(data)
        if self._discards_input:
            self._num_discarded += len(data)
            if self._num_discarded > 2 * self._limits.max_body_bytes:
                self._sender.abort()
            return
        if self._is_idle:
            self._is_idle = False
            self._deadline = self.loop.time() + self._limits.header_timeout_s
        self._request_size.add_data(len(data))
        self._feed(data)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        is_promised = self.cycle is None or self._wants_keep_alive
        if not is_promised or len(self.pipeline) >= MAX_PIPELINED:
            raise Refused(None)
        self._request_size.begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._request_size.add_url(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._request_size.in_body:
            return  # a trailer: headers cannot be changed after they were checked
        self._request_size.add_header(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if self.parser.should_upgrade() and method != b"CONNECT":
            self._offers_upgrade = True
            return
        check_headers(version, self.headers)
        target = read_target(method, self.url, self.headers)
        if self._is_surplus:
            if not is_probe(without_prefix(target.url.partition(b"?")[0].decode("ascii"), self.proxy_prefix)):
                raise Refused(refusals.FULL)
            self.headers.append((b"connection", b"close"))  # as if the client had asked for it: it is told so
        self.url = target.url
        if target.host is not None:
            self.headers[:] = [(b"host", target.host), *(pair for pair in self.headers if pair[0] != b"host")]
        self.expect_100_continue = self.expect_100_continue and version == "1.1"
        super().on_headers_complete()
        self.scope[WRITE_CHUNK] = chunk_writer(self.cycle)  # type: ignore[literal-required]
        self.scope[HOLD_HEAD] = head_holder(self.cycle)  # type: ignore[literal-required]
        if version == "1.0":
            end_with_connection(self.cycle)
        if self._is_queued(self.cycle):
            self.flow.resume_reading()  # else a disconnect would not be seen while the one before is answered
        else:
            self._running = self.cycle
        if target.is_server:
            self.scope["path"], self.scope["raw_path"] = "*", b"*"
        self._request_size.end_head()
        self._connections.serve(self)
        self._deadline = self.loop.time() + self._limits.body_timeout_s
        # A response before the end of the body must be the last: the rest of the body would be read as a request.
        self._wants_keep_alive = self.cycle.keep_alive
        self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._request_size.add_body(len(body))
        self._num_held += len(body)
        self._connections.num_body_bytes += len(body)
        if not self._connections.has_room_for_bodies:
            raise Refused(refusals.BODIES_FULL)
        super().on_body(body)
        if self.cycle is not self._running and len(self.cycle.body) > MAX_QUEUED_BODY:
            raise Refused(None)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._request_size.end_body()
        self._deadline = None
        self._is_last = self._is_last or self._connections.closes()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._wants_keep_alive and not self._is_last
        super().on_message_complete()

    # Callbacks of the response cycle

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if not self.pipeline:
            self._release_bodies()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._running, app = self.pipeline.pop()
            self._start_asgi_task(self._running, app)
            return
        self._connections.wait_for_client(self)
        if self._request_size.has_begun:
            self._deadline = self.loop.time() + self._limits.header_timeout_s
        else:
            self._is_idle = True
            self._deadline = self.loop.time() + self._limits.keep_alive_s

    def _is_queued(self, cycle: RequestResponseCycle) -> bool:
        """Whether a request waits until those before it are answered; the newest is on the left."""
        return bool(self.pipeline) and self.pipeline[0][0] is cycle

    def _should_upgrade(self) -> bool:
        return False

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
            self._request_size.check()
        except Refused as error:
            self._refuse(error.refusal)
        except httptools.HttpParserUpgrade as offer:
            self._ignore_upgrade(data[offer.args[0] :])
        except httptools.HttpParserCallbackError as error:
            self._refuse(_reason(error.__context__))
        except httptools.HttpParserError:
            self._refuse(refusals.MALFORMED_BODY if self._request_size.in_body else refusals.MALFORMED)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request again without its offer of another protocol: the parser would lose the body."""
        if not self._offers_upgrade:
            self._refuse(refusals.NO_TUNNEL)
            return
        self._offers_upgrade = False
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        head = without_upgrade(line, self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(head + rest)


def _reason(error: BaseException | None) -> Refusal | None:
    """Why a callback stopped the parser."""
    if isinstance(error, Refused):
        return error.refusal
    if isinstance(error, (httptools.HttpParserError, UnicodeError)):
        return refusals.BAD_TARGET
    log.error("a request could not be taken", exc_info=error)
    return refusals.BROKEN
