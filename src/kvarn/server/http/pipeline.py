"""The only ASGI layer around the routes: what every request passes before its route, and every response on its way out.

    id -> host, path -> CORS preflight -> API key -> lifecycle -> priority -> route -> failures as bodies -> access log

The checks themselves are elsewhere; here is their order. Leaves what it found in the scope, under the keys below.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarn.errors import InvalidParameter
from kvarn.observe.logs import RequestLine, log_request
from kvarn.server.access.auth import Authenticator, has_body
from kvarn.server.access.priority_gate import PriorityGate
from kvarn.server.failures import failure_response
from kvarn.server.http.cors import BrowserPolicy
from kvarn.server.http.request_head import without_prefix
from kvarn.server.http.request_id import id_headers, new_request_id
from kvarn.server.http.traffic import Traffic
from kvarn.server.process.lifecycle import Lifecycle, is_probe

REQUEST_ID = "kvarn.request_id"
RECEIVED_AT = "kvarn.received_at"  # time.monotonic()
PRINCIPAL = "kvarn.principal"  # None on paths that need no key
LOG_FIELDS = "kvarn.log"  # a dict to which routes add: model, prompt_tokens, ..., finish_reason
GIVEN_FIELDS = "kvarn.given"  # the names in a body that was read

MAX_PATH = 200  # characters that are logged
PROBE_STATUS = (200, 503)  # of probes, which are sent every few seconds: not logged, also while the answer is no
CLIENT_GONE = 499  # no status was sent
UNANSWERED = {CLIENT_GONE: "client_closed_request", 500: "internal_error"}  # codes where there was no body for one
_UNTIDY = re.compile(r"[\x00-\x1f\x7f\\\ufffd]|(?:^|/)\.{1,2}(?:/|$)")  # U+FFFD: bytes that are not UTF-8


class RequestPipeline:
    """ASGI: wraps the router."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        browsers: BrowserPolicy,
        auth: Authenticator,
        lifecycle: Lifecycle,
        traffic: Traffic,
        root_path: str = "",
        tag: str = "",
    ) -> None:
        """root_path: the prefix of a reverse proxy, which may pass it on or not; tag: of this server, in its ids."""
        self._app = app
        self._root_path = root_path
        self._tag = tag
        self._browsers = browsers
        self._auth = auth
        self._lifecycle = lifecycle
        self._gate = PriorityGate()
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} is served here")  # the server answers with 403 or closes
        scope["path"] = without_prefix(scope["path"], self._root_path)
        scope.update({REQUEST_ID: new_request_id(self._tag), RECEIVED_AT: time.monotonic(), LOG_FIELDS: {}})
        headers = [*id_headers(scope["path"], scope[REQUEST_ID]), *self._browsers.cors_headers(scope)]
        response = ResponseSender(send, headers)
        status = CLIENT_GONE
        try:
            await self._respond(scope, receive, response)
        except BaseException:
            status = 500
            raise
        finally:
            if response.status is None:
                scope[LOG_FIELDS]["error_code"] = UNANSWERED[status]
            status = response.status or status
            self._traffic.responses[status] += 1
            _log_access(scope, status, response.first_byte_s, response.elapsed_s)

    async def _respond(self, scope: Scope, receive: Receive, response: ResponseSender) -> None:
        """Run the steps and the route; whatever is raised before the first byte becomes a response."""
        # The server leaves out the body of a HEAD response by itself, so the routes need not know the method.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            self._browsers.check_host(scope)
            _check_path(scope["path"])
            if (answer := self._browsers.options_response(scope)) is not None:
                await answer(scope, receive, response)
                return
            response.closes = lambda: has_body(inner)  # one that is refused here is not even received
            inner[PRINCIPAL] = self._auth.principal(inner)
            await self._route(inner, receive, response)
        except Exception as error:
            if response.status is not None:
                raise  # the server logs it and cuts the connection
            await _failure(error, scope)(scope, receive, response)

    async def _route(self, scope: Scope, receive: Receive, response: ResponseSender) -> None:
        """Wait until the request may begin, and hand it to its route; probes are answered in every phase."""
        response.closes = lambda: self._lifecycle.closes_connections
        if is_probe(scope["path"]):
            await self._app(scope, receive, response)
            return
        with self._lifecycle.counted_request():
            if (refusal := self._lifecycle.refusal()) is not None:
                await _failure(refusal, scope)(scope, receive, response)
                return
            async with self._gate.admitted(scope[PRINCIPAL], scope["method"]):
                await self._app(scope, receive, response)


class ResponseSender:
    """send() of one request: adds the headers that every response has, and notes status and times."""

    __slots__ = ("_began", "_headers", "_send", "closes", "first_byte_s", "status")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._began = time.perf_counter()
        self.closes: Callable[[], bool] = _never  # whether the connection ends with this response
        self.status: int | None = None  # None: nothing was sent
        self.first_byte_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.first_byte_s = self.elapsed_s
            headers = list(message.get("headers", ()))
            if self.closes():
                headers = [*(one for one in headers if one[0].lower() != b"connection"), (b"connection", b"close")]
            given = {name for name, _ in headers}  # a router passes the id of a replica on
            message = {**message, "headers": [*headers, *(one for one in self._headers if one[0] not in given)]}
        await self._send(message)


def _log_access(scope: Scope, status: int, first_byte_s: float | None, duration_s: float) -> None:
    """One log line per request, when its last byte is out: what the steps and the route left in the scope."""
    if status in PROBE_STATUS and is_probe(scope["path"]):
        return
    principal = scope.get(PRINCIPAL)
    client = scope.get("client")
    log_request(
        RequestLine(
            request_id=scope[REQUEST_ID],
            method=scope["method"],
            path=scope["path"][:MAX_PATH],  # without the query string
            status=status,
            duration_s=duration_s,
            first_byte_s=first_byte_s,
            key=None if principal is None else principal.key_id,
            tier=None if principal is None else principal.tier.name,
            client=None if client is None else client[0],
            **scope[LOG_FIELDS],
        )
    )


def _failure(error: Exception, scope: Scope) -> Response:
    return failure_response(error, scope["path"], scope[REQUEST_ID], scope[LOG_FIELDS])


def _check_path(path: str) -> None:
    if path != "*" and _UNTIDY.search(path):
        raise InvalidParameter(
            "the path has a dot segment, a backslash, control characters or broken UTF-8", field=None
        )


def _never() -> bool:
    return False
