"""The outermost layer of the application: request ids, the Host check on loopback, CORS, tidy methods and paths.

A web page may send a browser to any address, also to 127.0.0.1 under a name of its own (DNS rebinding): so on loopback
the Host header must name this machine. CORS is off unless origins are configured, and never comes with credentials.
"""

from __future__ import annotations

import re
import secrets
import time

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarn.errors import AuthError, InvalidParameter, KvarnError
from kvarn.server.failures import failure_response, speaks_anthropic
from kvarn.server.process.settings import ServerConfig

REQUEST_ID = "kvarn.request_id"  # where the scope of a request carries it
RECEIVED_AT = "kvarn.received_at"  # the same for time.monotonic()

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
PREFLIGHT_S = 600  # a browser may remember the answer for this long
EXPOSED = ", ".join(
    ["retry-after", "x-request-id", "request-id"]
    + [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]
)
_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(?:[ \t]*,[ \t]*[A-Za-z0-9-]{1,64}){0,63}")  # of headers
_UNTIDY = re.compile(r"[\x00-\x1f\x7f\\\ufffd]|(?:^|/)\.{1,2}(?:/|$)")  # U+FFFD: bytes that are not UTF-8


class Edge:
    """ASGI: everything passes here first, and every response goes out with its id."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._origins = frozenset(config.cors_origins)
        self._hosts: frozenset[str] | None = None  # any
        if config.is_loopback:
            named = (config.host, *config.allowed_hosts)
            self._hosts = LOOPBACK_NAMES | {host.lower().strip("[]") for host in named}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(16)
        scope[REQUEST_ID] = request_id
        scope[RECEIVED_AT] = time.monotonic()
        origin = self._known_origin(scope)
        outgoing = _Outgoing(send, _id_headers(scope["path"], request_id), origin)
        answer = self._own_answer(scope, origin)
        if answer is not None:
            await answer(scope, receive, outgoing)
            return
        # The server leaves out the body of a HEAD response by itself, so the routes need not know the method.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await self._app(inner, receive, outgoing)
        except Exception as error:
            if outgoing.has_started:
                raise  # the server logs it and cuts the connection
            await failure_response(error, scope["path"], request_id)(scope, receive, outgoing)

    def _own_answer(self, scope: Scope, origin: str | None) -> Response | None:
        """What needs no route: refusals, preflights, and OPTIONS for the server as such."""
        error = self._refusal(scope)
        if error is not None:
            return failure_response(error, scope["path"], scope[REQUEST_ID])
        if scope["method"] != "OPTIONS":
            return None
        wanted = _header(scope, b"access-control-request-method")
        if origin is not None and wanted is not None:
            return _preflight(_header(scope, b"access-control-request-headers"))
        return Response(status_code=204, headers={"allow": METHODS}) if scope["path"] == "*" else None

    def _refusal(self, scope: Scope) -> KvarnError | None:
        host = _host_name(_header(scope, b"host") or "")
        if self._hosts is not None and host not in self._hosts:
            return AuthError(
                f"this server is bound to loopback and does not answer to the host {host[:80]!r}; "
                "ask for localhost, or name the host in allowed_hosts",
                reason="forbidden",
            )
        if scope["path"] != "*" and _UNTIDY.search(scope["path"]):
            return InvalidParameter("the path has a dot segment, a backslash, control characters or broken UTF-8")
        return None

    def _known_origin(self, scope: Scope) -> str | None:
        origin = _header(scope, b"origin") if self._origins else None
        return origin if origin in self._origins else None


class _Outgoing:
    """send() of one request, with the headers that every response has."""

    __slots__ = ("_headers", "_send", "has_started")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], origin: str | None) -> None:
        self._send = send
        self._headers = headers
        if origin is not None:
            self._headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", EXPOSED.encode()),
                (b"vary", b"origin"),
            ]
        self.has_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)


def _id_headers(path: str, request_id: str) -> list[tuple[bytes, bytes]]:
    """Anthropic's clients look for the id under another name than OpenAI's; /v1/models is for both."""
    is_for_anthropic = speaks_anthropic(path) or path == "/v1/models" or path.startswith("/v1/models/")
    names = (b"x-request-id", b"request-id") if is_for_anthropic else (b"x-request-id",)
    return [(name, request_id.encode()) for name in names]


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
