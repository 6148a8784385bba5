"""The head of a request: what it asks for, and whether two servers could read it differently. Pure functions.

The parser refuses broken syntax; here is what RFC 9110 and 9112 ask of a server beyond that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httptools

from kvarn.server.http import refusals
from kvarn.server.http.refusals import Refused

Headers = Sequence[tuple[bytes, bytes]]

_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::[0-9]{0,5})?")


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for: a path with its query, or for OPTIONS the server as such; and the host that was named."""

    url: bytes
    host: bytes | None
    is_server: bool = False  # OPTIONS *


def read_target(method: bytes, url: bytes, headers: Headers) -> Target:
    """The target in origin form, or Refused. The host of an absolute URL counts more than the header."""
    if method == b"CONNECT":
        raise Refused(refusals.NO_TUNNEL)
    host = next(_values(headers, b"host"), None)
    if url == b"*" and method == b"OPTIONS":
        return Target(b"/", host, is_server=True)
    if url.startswith(b"/") and url.isascii():
        return Target(url, host)
    return _absolute(url)


def check_headers(version: str, headers: Headers) -> None:
    """Raise Refused unless the headers say clearly where the body ends and for which host it is."""
    if version not in ("1.0", "1.1"):
        raise Refused(refusals.BAD_VERSION)
    hosts = list(_values(headers, b"host"))
    if len(hosts) > 1 or (version == "1.1" and not hosts) or not all(_HOST.fullmatch(host) for host in hosts):
        raise Refused(refusals.BAD_HOST)
    _check_length(version, headers)
    if version == "1.1" and any(value.lower() != b"100-continue" for value in _values(headers, b"expect")):
        raise Refused(refusals.BAD_EXPECTATION)


def without_prefix(path: str, prefix: str) -> str:
    """The path as routes and access rules know it; the prefix of a reverse proxy is taken away once."""
    return path[len(prefix) :] or "/" if prefix and (path == prefix or path.startswith(prefix + "/")) else path


def without_upgrade(head: bytes, headers: Headers) -> bytes:
    """The head again as bytes, without the offer of another protocol, which the parser would accept."""
    kept = [(name, value) for name, value in headers if name not in (b"upgrade", b"http2-settings")]
    lines = [
        name + b": " + (_without_upgrade_tokens(value) if name == b"connection" else value) for name, value in kept
    ]
    return b"\r\n".join([head, *lines, b"", b""])


def _without_upgrade_tokens(value: bytes) -> bytes:
    tokens = [token.strip() for token in value.split(b",")]
    return b", ".join(token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings"))


def _check_length(version: str, headers: Headers) -> None:
    # The size limit is checked later: a request without a key is refused for that first.
    lengths = list(_values(headers, b"content-length"))
    encodings = list(_values(headers, b"transfer-encoding"))
    if encodings:
        last = encodings[-1].lower().rpartition(b",")[2].strip()
        if lengths or version == "1.0" or last != b"chunked":
            raise Refused(refusals.BAD_LENGTH)
        if len(encodings) > 1 or encodings[0].lower() != b"chunked":
            raise Refused(refusals.BAD_ENCODING)
    if len(lengths) > 1 or not all(value.isdigit() for value in lengths):
        raise Refused(refusals.BAD_LENGTH)


def _absolute(url: bytes) -> Target:
    """http://host:port/path?query, which every server must take."""
    if not url.lower().startswith((b"http://", b"https://")) or not url.isascii():
        raise Refused(refusals.BAD_TARGET)
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise Refused(refusals.BAD_TARGET) from None
    if parts.host is None or parts.userinfo is not None:
        raise Refused(refusals.BAD_TARGET)
    host = b"[" + parts.host + b"]" if b":" in parts.host else parts.host
    if parts.port:
        host += b":%d" % parts.port
    if not _HOST.fullmatch(host):
        raise Refused(refusals.BAD_HOST)
    query = b"" if parts.query is None else b"?" + parts.query
    return Target((parts.path or b"/") + query, host)


def _values(headers: Headers, wanted: bytes) -> Iterator[bytes]:
    return (value for name, value in headers if name == wanted)
