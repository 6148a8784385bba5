"""What web pages may do with this server: the Host check on loopback, CORS headers and preflights.

A web page may send a browser to any address, also to 127.0.0.1 under a name of its own (DNS rebinding): so on loopback
the Host header must name this machine. CORS is off unless origins are configured, and never comes with credentials.
"""

from __future__ import annotations

import re

from starlette.responses import Response
from starlette.types import Scope

from kvarn.errors import AuthError
from kvarn.server.process.settings import ServerConfig

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
PREFLIGHT_S = 600  # a browser may remember the answer for this long
EXPOSED = ", ".join(
    ["retry-after", "x-request-id", "request-id", "x-kvarn-warning"]
    + [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]
)
_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(?:[ \t]*,[ \t]*[A-Za-z0-9-]{1,64}){0,63}")  # of headers


class BrowserPolicy:
    """The configured hosts and origins of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(config.cors_origins)
        self._hosts: frozenset[str] | None = None  # any
        if config.is_loopback and config.uds is None:  # no browser reaches a Unix socket by itself
            named = (config.host, *config.allowed_hosts)
            self._hosts = LOOPBACK_NAMES | {host.lower().strip("[]") for host in named}

    def check_host(self, scope: Scope) -> None:
        """Raise AuthError unless the Host header names this server."""
        host = _host_name(_header(scope, b"host") or "")
        if self._hosts is not None and host not in self._hosts:
            raise AuthError(
                f"this server is bound to loopback and does not answer to the host {host[:80]!r}; "
                "ask for localhost, or name the host in allowed_hosts",
                reason="forbidden",
            )

    def cors_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Of the response to a configured origin; to others there are none."""
        origin = self._known_origin(scope)
        if origin is None:
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED.encode()),
            (b"vary", b"origin"),
        ]

    def options_response(self, scope: Scope) -> Response | None:
        """The response to a preflight, and to OPTIONS for the server as such; None: a route answers."""
        if scope["method"] != "OPTIONS":
            return None
        wanted = _header(scope, b"access-control-request-method")
        if self._known_origin(scope) is not None and wanted is not None:
            return _preflight(_header(scope, b"access-control-request-headers"))
        return Response(status_code=204, headers={"allow": METHODS}) if scope["path"] == "*" else None

    def _known_origin(self, scope: Scope) -> str | None:
        origin = _header(scope, b"origin") if self._origins else None
        return origin if origin in self._origins else None


def _preflight(wanted: str | None) -> Response:
    """What a browser asks before it sends another site's request; never with credentials."""
    headers = {"access-control-allow-methods": METHODS, "access-control-max-age": str(PREFLIGHT_S)}
    if wanted is not None and _NAMES.fullmatch(wanted):
        headers["access-control-allow-headers"] = wanted
    return Response(status_code=204, headers=headers)


def _header(scope: Scope, wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)


def _host_name(host: str) -> str:
    """The name without the port: [::1]:8000 is ::1."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")
