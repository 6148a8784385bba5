"""What a router and a replica exchange, whatever carries it: a request, and an answer that is read as it comes.

`upstream.py` carries it over HTTP, `kvarn.server.ray` as calls of Ray. Knows no address and no body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvarn.errors import RequestError

Headers = list[tuple[bytes, bytes]]


class UpstreamFailed(RequestError):
    """A replica could not be reached, or the connection to it broke."""

    def __init__(self, message: str, *, is_unreached: bool = False, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_unreached = is_unreached  # nothing was sent
        self.is_silent = is_silent  # nothing came for too long, not even a refusal


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request as a replica gets it; its host is the replica's own."""

    method: str
    target: bytes  # path and query
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes = b""
    client: tuple[str, int] | None = None  # who asked the router


class UpstreamExchange(Protocol):
    """One request to a replica after the other, each with its answer."""

    status: int
    headers: Headers
    has_begun: bool  # a byte of the answer has come

    async def begin(self, request: UpstreamRequest) -> None:
        """Send a request and wait for the head of its answer; UpstreamFailed when that does not come."""

    async def read(self) -> bytes:
        """The next piece of the body; b"": that was all. UpstreamFailed when it breaks off before."""

    def abort(self, reason: str = "the connection was closed") -> None:
        """End the exchange at both ends; who reads from it is told why."""


class Upstream(Protocol):
    """The way to one replica."""

    async def take(self, *, is_new: bool = False) -> tuple[Any, bool]:
        """An exchange, and whether it was used before; is_new: it must not have been."""

    def give_back(self, connection: Any) -> None:
        """Its answer is complete, or nobody wants the rest."""


async def read_all(exchange: UpstreamExchange, limit: int) -> bytes:
    """The whole body; UpstreamFailed when it is longer than the limit."""
    parts, num_bytes = [], 0
    while data := await exchange.read():
        parts.append(data)
        num_bytes += len(data)
        if num_bytes > limit:
            raise UpstreamFailed(f"a replica's answer has more than {limit:,} bytes")
    return b"".join(parts)
