"""Which key sent a request: decided from headers and the path, before anything of the body is read.

Works on paths, so a new route is closed from the start. What a refusal looks like is decided in failures.py.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from urllib.parse import unquote_plus

from starlette.types import Scope

from kvarn.errors import AuthError
from kvarn.routing.feed import PATH as REPLICA_PATH
from kvarn.server.access.keys import KeyRing, Principal
from kvarn.server.page.assets import PAGE_PATHS

# Every path needs a key except these, the next, and PAGE_PATHS for GET and HEAD. Exact paths: no other spelling.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/startup", "/docs"})
CLUSTER_PATHS = frozenset({REPLICA_PATH})  # opened by the cluster's key, which their route asks for
METRICS_PATH = "/metrics"  # free on loopback; elsewhere for tiers that see metrics

QUERY_NAMES = frozenset({"api_key", "api-key", "apikey", "access_token", "x-api-key", "authorization", "key", "token"})
# Headers that proxies add, and all whose name begins with x-forwarded-.
FORWARDED = frozenset({b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip"})


class Authenticator:
    """Finds the principal of a request, or refuses it."""

    def __init__(self, keys: KeyRing, *, takes_local: bool) -> None:
        """takes_local: whoever connects from this machine asks for itself; there is no proxy before the server."""
        self._keys = keys
        self._takes_local = takes_local

    def principal(self, scope: Scope) -> Principal | None:
        """The principal of the request's key, or AuthError; None for strangers on paths that need no key."""
        if _is_public(scope):
            with suppress(AuthError):
                return self._authenticated(scope)
            return None
        if scope["path"] == METRICS_PATH and self._is_local(scope):
            return None
        if not self._keys.is_open:
            _check_query(scope)
        principal = self._authenticated(scope)
        if scope["path"] == METRICS_PATH and not principal.tier.sees_metrics:
            raise AuthError(
                f"tier {principal.tier.name!r} does not see the metrics; use a key of one that does", reason="forbidden"
            )
        return principal

    def _authenticated(self, scope: Scope) -> Principal:
        return self._keys.authenticate(_values(scope, b"authorization"), _values(scope, b"x-api-key"))

    def _is_local(self, scope: Scope) -> bool:
        """Whether the request comes from this machine, and not through a proxy on it."""
        return self._takes_local and not _is_forwarded(scope) and _is_loopback(scope.get("client"))


def _is_public(scope: Scope) -> bool:
    is_page = scope["method"] == "GET" and scope["path"] in PAGE_PATHS  # the pipeline has made GET of HEAD
    return is_page or scope["path"] in PUBLIC_PATHS or scope["path"] in CLUSTER_PATHS


def has_body(scope: Scope) -> bool:
    """Whether the headers announce a body."""
    names = {name.lower(): value for name, value in scope["headers"]}
    return b"transfer-encoding" in names or names.get(b"content-length", b"0") != b"0"


def _is_forwarded(scope: Scope) -> bool:
    # HTTP/1.0 is what nginx speaks to a server behind it, with no header of its own, unless it is told otherwise.
    names = [name.lower() for name, _ in scope["headers"]]
    has_header = any(name in FORWARDED or name.startswith(b"x-forwarded-") for name in names)
    return has_header or scope.get("http_version") == "1.0"


def _values(scope: Scope, name: bytes) -> list[bytes]:
    # Space around a value is no part of it (RFC 9110, 5.5), and the parser leaves it there.
    return [value.strip(b" \t") for key, value in scope["headers"] if key.lower() == name]


def _check_query(scope: Scope) -> None:
    """Refuse keys in the URL."""
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
    return client is not None and _is_loopback_host(client[0])


@lru_cache(1024)
def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
