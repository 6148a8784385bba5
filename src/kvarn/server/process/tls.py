"""TLS of the server: one context whose certificate can be read again, and a bound on handshakes under way.

A connection is counted by http/connections.py when its handshake is over; until then it is counted here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvarn.checks import why_unreadable
from kvarn.errors import ConfigError
from kvarn.server.http.connections import Listener, address_of
from kvarn.server.http.limits import MAX_HANDSHAKES
from kvarn.server.process.settings import ServerConfig

MAX_HANDSHAKES_OF_HOST = MAX_HANDSHAKES // 2
SHUTDOWN_S = 2.0  # for the client to say goodbye, too


class Certificate:
    """The certificate and its key, as files, and the context that offers them."""

    def __init__(self, config: ServerConfig) -> None:
        assert config.tls_cert is not None
        assert config.tls_key is not None
        self._cert, self._key = config.tls_cert, config.tls_key
        self.context = self._context()

    def read_again(self) -> None:
        """Offer the files as they are now to new connections; raises ConfigError, and then all stays as it is."""
        self._context()  # a certificate without its key must not replace a pair that works
        self._load_into(self.context)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        for name, path in (("tls_cert", self._cert), ("tls_key", self._key)):
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(f"{name} {path} cannot be read: {why_unreadable(path, error)}") from None
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            why = error.reason if isinstance(error, ssl.SSLError) and error.reason else error
            raise ConfigError(
                f"tls_cert {self._cert} and tls_key {self._key} are no certificate with its key ({why}); "
                "give PEM files, the key without a password"
            ) from None


@dataclass(frozen=True, slots=True)
class _Handshake:
    connection: socket.socket
    host: str

    def is_open(self, fd: int) -> bool:
        """Whether the connection still has this descriptor, and has not failed."""
        return self.connection.fileno() == fd


class TlsListener(Listener):
    """Closes new connections at once while too many handshakes are under way, in all or from one host."""

    _handshakes: dict[int, _Handshake]  # by descriptor

    def __init__(self, family: int, kind: int) -> None:
        super().__init__(family, kind)
        self._handshakes = {}

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        host = address_of(address)
        self._handshakes = {fd: one for fd, one in self._handshakes.items() if one.is_open(fd)}
        if not self._has_room(host):
            connection.close()
            raise BlockingIOError  # as if nobody were waiting; the event loop comes again
        self._handshakes[connection.fileno()] = _Handshake(connection, host)
        return connection, address

    def _has_room(self, host: str) -> bool:
        """Whether one more may begin; where too many are under way, the host with the most gives up its oldest."""
        num_of = Counter(one.host for one in self._handshakes.values())
        if num_of[host] >= MAX_HANDSHAKES_OF_HOST:
            return False
        if len(self._handshakes) < MAX_HANDSHAKES:
            return True
        crowd, most = num_of.most_common(1)[0]
        if num_of[host] >= most:
            return False
        fd, oldest = next((fd, one) for fd, one in self._handshakes.items() if one.host == crowd)
        del self._handshakes[fd]
        with suppress(OSError):
            oldest.connection.shutdown(socket.SHUT_RDWR)  # the event loop sees the end and closes it
        return True

    def end_handshake(self, transport: asyncio.BaseTransport) -> None:
        """It went well: the connection is now counted as one."""
        self._handshakes.pop(transport.get_extra_info("socket").fileno(), None)


def _no_password() -> str:
    """Instead of asking at the terminal."""
    raise ValueError("the key has a password")
