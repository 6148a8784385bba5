"""How a connection ends: at a deadline, with a refusal, after its last response, or because the client is gone.

Responses to earlier requests of the connection are still sent; nothing is sent into the middle of one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvarn.server.http import refusals
from kvarn.server.http.connections import LOCAL, Connections, address_of
from kvarn.server.http.limits import LINGER_S, SURPLUS_S
from kvarn.server.http.refusals import Refusal
from kvarn.server.http.request_size import RequestSize
from kvarn.server.http.transport import STREAM_GRACE_S, CountingTransport, SlowReaderCheck, is_stream

log = logging.getLogger("kvarn.server.http")


class ConnectionEnd(HttpToolsProtocol):
    """The part of LimitedProtocol that ends connections; reading requests is the other part."""

    connections_of_server: ClassVar[Connections]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections = self.connections_of_server
        self._limits = self._connections.limits
        self._request_size = RequestSize(self._limits)
        self._running: RequestResponseCycle | None = None  # the one being answered; self.cycle is the newest
        self._deadline: float | None = None  # of the client; None: the server is to act
        self._discards_input = False  # whatever still arrives is dropped
        self._is_last = False  # no request after those that have arrived
        self._is_surplus = False  # beyond the limit: for a probe only
        self.address = LOCAL
        self._num_held = 0  # bytes of bodies
        self._num_discarded = 0
        self._behind_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connections.on_made(transport)
        self._sender = CountingTransport(transport, self._on_transport_close, self._connections.traffic)
        self._slow_reader = SlowReaderCheck(self._sender, self._limits)
        super().connection_made(self._sender)
        size = self._limits.max_buffered_bytes
        transport.set_write_buffer_limits(high=size, low=size)
        self.address = address_of(transport.get_extra_info("peername"))
        if self._connections.admit(self):
            self._deadline = self.loop.time() + self._limits.header_timeout_s
        elif self._connections.has_overflow_room():
            self._is_surplus = self._is_last = True
            self._deadline = self.loop.time() + SURPLUS_S
        else:
            self._send(refusals.FULL)
            self._sender.close_now()

    @property
    def awaits_client(self) -> bool:
        """Whether there is nothing to be answered."""
        return self._last_unanswered() is None

    def make_room(self) -> None:
        """Close this connection, which waits for its client, for another one."""
        has_unsent = self._sender.num_unsent > 0
        if not self._discards_input and (self._running is None or self._request_size.has_begun):
            self._send(refusals.FULL)  # to a client that expects no answer it would be the answer to its next request
        if has_unsent or self._discards_input:
            self._sender.abort()
        else:
            self._sender.close_now()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._disconnect_requests()
        self._release_bodies()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client will send no more. Whether it still reads cannot be known: what is not answered is cancelled."""
        self._disconnect_requests()

    def pause_writing(self) -> None:
        self._behind_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._behind_since = None
        super().resume_writing()

    def check_deadlines(self, now: float) -> None:
        """Compare the deadlines with the time."""
        if self._slow_reader.is_stuck(now) or self._is_far_behind(now):
            self._connections.traffic.num_dropped += 1
            log.info("dropped a client that does not read: %d bytes wait for it", self._sender.num_unsent)
            self._sender.abort()
        elif self._deadline is not None and now >= self._deadline:
            self._on_deadline(now)

    def end_after_response(self) -> None:
        """Close the connection after the responses that are still to be sent."""
        self._is_last = True
        if (last := self._last_unanswered()) is not None:
            last.keep_alive = False

    def shutdown(self) -> None:
        self.end_after_response()
        if self._last_unanswered() is None:
            self._sender.close_now()

    def _refuse(self, refusal: Refusal | None) -> None:
        """Refuse the newest request. Those before it are still answered; then the connection ends."""
        if self._discards_input or self.transport.is_closing():
            return
        is_running = self._request_size.in_body and self.cycle is self._running
        if self._request_size.in_body and not is_running:
            self.pipeline.popleft()
        if is_running and self._running is not None:
            has_started = self._running.response_started
            self._disconnect_requests()
            self._answer(None if has_started else refusal)
        elif (last := self._last_unanswered()) is not None:
            last.keep_alive = False
            self._discards_input = True
            self._deadline = None
        else:
            self._answer(refusal)

    def _answer(self, refusal: Refusal | None) -> None:
        self._release_bodies()
        if refusal is not None:
            log.debug("refused a request: %d %s", refusal.status, refusal.code)
            self._send(refusal, has_body=self.parser.get_method() != b"HEAD")
        self._linger()

    def _send(self, refusal: Refusal, *, has_body: bool = True) -> None:
        self._connections.traffic.responses[refusal.status] += 1
        self._connections.traffic.num_refused += refusal is refusals.FULL
        self._sender.write(refusal.response(has_body))

    def _on_deadline(self, now: float) -> None:
        if self._discards_input:
            self._sender.abort()
        elif self._is_surplus and not self._request_size.in_body:
            self._refuse(refusals.FULL)
        elif self._request_size.in_body and self.flow.read_paused:
            self._deadline = now + self._limits.body_timeout_s  # it is the server that does not read
        elif self._request_size.in_body:
            self._refuse(refusals.SLOW_BODY)
        elif self._request_size.has_begun:
            self._refuse(refusals.SLOW_HEAD)
        else:
            self._sender.close_now()

    def _is_far_behind(self, now: float) -> bool:
        grows = self._running is not None and is_stream(self._running)
        return grows and self._behind_since is not None and now - self._behind_since >= STREAM_GRACE_S

    def _last_unanswered(self) -> RequestResponseCycle | None:
        if self.pipeline:
            return self.pipeline[0][0]
        return None if self._running is None or self._running.response_complete else self._running

    def _disconnect_requests(self) -> None:
        """Report a disconnect for every request that is not answered yet."""
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in [*waiting, *([self._running] if self._running else [])]:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self.flow.resume_writing()

    def _on_transport_close(self) -> None:
        if self._discards_input or self._request_size.in_body:
            self._linger()
        else:
            self._sender.close_now()

    def _linger(self) -> None:
        self._discards_input = True
        self._connections.wait_for_client(self)
        self._deadline = self.loop.time() + LINGER_S
        self._sender.half_close()
        self.flow.resume_reading()

    def _release_bodies(self) -> None:
        self._connections.num_body_bytes -= self._num_held
        self._num_held = 0
