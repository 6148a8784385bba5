"""uvicorn around our protocol and our application: what it is told, and what it must leave to us."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from kvarn.server.http.connections import ACCEPTED_PER_TURN, Listener
from kvarn.server.http.protocol import make_protocol
from kvarn.server.http.traffic import Traffic
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.process.settings import ServerConfig
from kvarn.server.process.tls import SHUTDOWN_S, Certificate, TlsListener


class HttpServer(uvicorn.Server):
    """Without uvicorn's signal handlers: they know no drain delay, and exit with the signal as the exit code."""

    def __init__(self, config: uvicorn.Config, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, with deadlines for the beginning and the end of TLS."""
        config = self.config
        make = partial(  # uvicorn's type says less than it calls
            config.http_protocol_class,
            config=config,  # type: ignore[call-arg]
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        limits: dict[str, Any] = {"backlog": config.backlog}
        if config.ssl is not None:
            limits |= {"ssl_handshake_timeout": self._handshake_timeout_s, "ssl_shutdown_timeout": SHUTDOWN_S}
        loop = asyncio.get_running_loop()
        self.servers = [await loop.create_server(make, sock=one, ssl=config.ssl, **limits) for one in sockets or ()]
        self.started = True


class HttpParts(Protocol):
    """What connections need of a server or a router."""

    @property
    def config(self) -> ServerConfig: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
    @property
    def traffic(self) -> Traffic: ...


def make_http_server(state: HttpParts, app: ASGIApp, listener: Listener, certificate: Certificate | None) -> HttpServer:
    """The server around an application; it begins to accept when serve([listener]) runs."""
    protocol = make_protocol(state.config, state.lifecycle, state.traffic)
    server = HttpServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=ACCEPTED_PER_TURN,
            proxy_headers=False,  # a client cannot claim another address
        ),
        state.config.header_timeout_s,
    )
    server.config.load()
    if certificate is not None and isinstance(listener, TlsListener):
        server.config.ssl = certificate.context
        protocol.connections_of_server.on_made = listener.end_handshake
    return server
