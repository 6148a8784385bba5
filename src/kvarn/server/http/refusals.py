"""Responses of the connection itself, to requests that never reach the application. Always its last response.

The body has the same shape as those of failures.py, so that clients show the message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus

from kvarn.server.http.request_id import new_request_id


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status, a code and a message."""

    status: int
    code: str
    message: str
    retry_after_s: int | None = None

    def response(self, has_body: bool = True) -> bytes:
        """The whole response as bytes; without a body for HEAD."""
        body = self._body()
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {new_request_id()}",
            "connection: close",
        ]
        if self.retry_after_s is not None:
            lines.append(f"retry-after: {self.retry_after_s}")
        return "\r\n".join([*lines, "", ""]).encode("ascii") + (body if has_body else b"")

    def _body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode("ascii")


class Refused(Exception):
    """Raised inside a parser's callback to stop it; without a refusal the rest is dropped without a response."""

    def __init__(self, refusal: Refusal | None) -> None:
        super().__init__(refusal.message if refusal else "")
        self.refusal = refusal


MALFORMED = Refusal(400, "malformed_request", "this is not an HTTP/1.1 request that we can read")
MALFORMED_BODY = Refusal(400, "malformed_request", "the body is not encoded as its headers say")
BAD_TARGET = Refusal(400, "malformed_request", "the request target is not a path, or not one of ours")
BAD_HOST = Refusal(400, "malformed_request", "the request needs exactly one valid Host header")
BAD_LENGTH = Refusal(400, "malformed_request", "the length of the body is not clear from the headers")
BAD_VERSION = Refusal(505, "unsupported_version", "speak HTTP/1.1 or HTTP/1.0")
BAD_EXPECTATION = Refusal(417, "unsupported_expectation", "the only expectation we know is 100-continue")
BAD_ENCODING = Refusal(501, "unsupported_encoding", "the only transfer encoding we know is chunked")
NO_TUNNEL = Refusal(501, "unsupported_method", "this server is no proxy")
SLOW_HEAD = Refusal(408, "request_timeout", "the headers did not arrive in time; send the whole request at once")
SLOW_BODY = Refusal(408, "request_timeout", "the body did not arrive in time; send it faster, or send less")
FULL = Refusal(503, "too_many_connections", "the server has no connection to spare; try again soon", 1)
BODIES_FULL = Refusal(503, "overloaded", "the server holds too many request bodies; try again soon", 1)
BROKEN = Refusal(500, "internal_error", "the server failed on this request")


def long_url(limit: int) -> Refusal:
    return Refusal(414, "url_too_long", f"the request target has more than {limit:,} bytes; put values into the body")


def large_head(limit: int) -> Refusal:
    return Refusal(431, "headers_too_large", f"the headers have more than {limit:,} bytes; send less")


def many_headers(limit: int) -> Refusal:
    return Refusal(431, "too_many_headers", f"there are more than {limit:,} headers; send fewer")


def large_body(limit: int) -> Refusal:
    return Refusal(413, "body_too_large", f"the body has more than {limit:,} bytes; send less")
