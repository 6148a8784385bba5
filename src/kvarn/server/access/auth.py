"""The gate in front of every route: no principal, no entry. It works on paths, so a new route is closed from the start.

Decides before anything of the body is read. Knows headers and paths; what a refusal looks like is failures.py's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from urllib.parse import unquote_plus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarn.errors import AuthError, KvarnError
from kvarn.server.access.keys import KeyRing, Principal

PRINCIPAL = "kvarn.principal"  # where the scope of a request carries it

# Every path needs a key except these. Exact paths: nothing below them, no other spelling.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/startup"})
METRICS_PATH = "/metrics"  # free on loopback; elsewhere for tiers that see metrics

QUERY_NAMES = frozenset({"api_key", "api-key", "apikey", "access_token", "x-api-key", "authorization", "key", "token"})
FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})

Refuse = Callable[[KvarnError], ASGIApp]  # makes the response that tells about an error


class AuthMiddleware:
    """Puts the principal into the scope, or refuses."""

    def __init__(self, app: ASGIApp, keys: KeyRing, refuse: Refuse, *, is_loopback: bool) -> None:
        """is_loopback: the server is bound to an address of this machine only."""
        self._app = app
        self._keys = keys
        self._refuse = refuse
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} is served here")  # the server answers with 403 or closes
        try:
            principal = self._principal(scope)
        except AuthError as error:
            await self._refuse(error)(scope, receive, _closing(send) if _has_body(scope) else send)
            return
        scope[PRINCIPAL] = principal
        await self._app(scope, receive, send)

    def _principal(self, scope: Scope) -> Principal | None:
        """Who asks; None: nobody needs to know."""
        if scope["path"] in PUBLIC_PATHS or (scope["path"] == METRICS_PATH and self._is_local(scope)):
            return None
        if not self._keys.is_open:
            _refuse_keys_in_the_url(scope)
        principal = self._keys.authenticate(_values(scope, b"authorization"), _values(scope, b"x-api-key"))
        if scope["path"] == METRICS_PATH and not principal.tier.sees_metrics:
            raise AuthError(
                f"tier {principal.tier.name!r} does not see the metrics; use a key of one that does", reason="forbidden"
            )
        return principal

    def _is_local(self, scope: Scope) -> bool:
        """Whether the request comes from this machine, and not through a proxy on it."""
        is_forwarded = any(name.lower() in FORWARDED for name, _ in scope["headers"])
        return self._is_loopback and not is_forwarded and _is_loopback(scope.get("client"))


def _has_body(scope: Scope) -> bool:
    names = {name.lower(): value for name, value in scope["headers"]}
    return b"transfer-encoding" in names or names.get(b"content-length", b"0") != b"0"


def _closing(send: Send) -> Send:
    """Close the connection behind the response, so that a refused body is not even received."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_and_close


def _values(scope: Scope, name: bytes) -> list[bytes]:
    # Space around a value is no part of it (RFC 9110, 5.5), and the parser leaves it there.
    return [value.strip(b" \t") for key, value in scope["headers"] if key.lower() == name]


def _refuse_keys_in_the_url(scope: Scope) -> None:
    for name in _query_names(scope["query_string"]):
        if name in QUERY_NAMES:
            raise AuthError(
                f"the URL has {name!r}; keys are read from headers only. One that was in a URL lies in logs: "
                "revoke it and make another",
                reason="invalid",
            )


def _query_names(query: bytes) -> Iterator[str]:
    for part in query.decode("latin-1").replace(";", "&").split("&"):
        yield unquote_plus(part.partition("=")[0]).strip().lower()


def _is_loopback(client: tuple[str, int] | None) -> bool:
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
