"""A request as a call of Ray, and its answer: the head, then pieces of the body, several tokens at a time.

A message of Ray costs more than a token does. The first piece goes at once, the others at most one in each INTERVAL_S,
with all that has come meanwhile. Whoever gives the answer up is to the application a client that has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from kvarn.server.router.exchange import Headers, UpstreamRequest

INTERVAL_S = 0.02  # between two pieces of one answer
HOST = b"localhost"  # the client's own was checked where it came in
END_S = 5.0  # for the application to end a request that nobody wants


@dataclass(frozen=True, slots=True)
class CallHead:
    """Before the body of an answer."""

    status: int
    headers: Headers


class ReplicaCall:
    """One request in the application of a replica."""

    def __init__(self, request: UpstreamRequest) -> None:
        self._scope = _scope(request)
        self._body: bytes | None = request.body
        self._is_unwanted = asyncio.Event()
        self._has_news = asyncio.Event()
        self._is_complete = False
        self._head: CallHead | None = None
        self._pieces: list[bytes] = []

    async def answer(self, app: ASGIApp) -> AsyncIterator[CallHead | bytes]:
        """What the application sends; what it raises after the head breaks the answer off."""
        running = asyncio.create_task(self._run(app))
        try:
            while not self._is_complete or self._pieces or self._head is not None:
                await self._has_news.wait()
                self._has_news.clear()
                if self._head is not None:
                    head, self._head = self._head, None
                    yield head
                if self._pieces:
                    data = b"".join(self._pieces)
                    self._pieces.clear()
                    yield data
                    if not self._is_complete:
                        await asyncio.wait({running}, timeout=INTERVAL_S)
                self._is_complete |= running.done()
                if self._is_complete:
                    self._has_news.set()
            await running
        finally:
            self._is_unwanted.set()
            if not running.done():
                await asyncio.wait({running}, timeout=END_S)
                running.cancel()

    async def _run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            self._is_complete = True
            self._has_news.set()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_unwanted.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = CallHead(message["status"], [(bytes(n).lower(), bytes(v)) for n, v in message["headers"]])
        elif data := message.get("body", b""):
            self._pieces.append(data)
        self._has_news.set()


def _scope(request: UpstreamRequest) -> Scope:
    path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(b"host", HOST), *request.headers],
        "client": request.client,
        "server": None,
    }
