"""One request to a replica as a streaming call of Ray Serve, in the form in which a router exchanges requests."""

from __future__ import annotations

import asyncio
from typing import Any

from kvarn.server.ray.calls import CallHead
from kvarn.server.router.exchange import Headers, UpstreamFailed, UpstreamRequest

MAX_UNREAD = 64  # pieces that wait for a client that is behind; those after them wait at Ray


class ReplicaGone(Exception):
    """The replica that was named does not run any more; nothing was sent."""


class RayExchange:
    """For one request; RayExchange.begin() may be called once."""

    def __init__(self, handle: Any, replica: str) -> None:
        """handle: of the deployment, with stream=True."""
        self.status = 0
        self.headers: Headers = []
        self.has_begun = False
        self._handle = handle
        self._replica = replica
        self._response: Any = None
        self._pulling: asyncio.Task[None] | None = None
        self._parts: asyncio.Queue[CallHead | bytes | None] = asyncio.Queue(MAX_UNREAD)
        self._error: UpstreamFailed | None = None
        self._is_complete = False

    async def begin(self, request: UpstreamRequest) -> None:
        """Send a request and wait for the head of its answer; UpstreamFailed when that does not come."""
        self._response = self._handle.answer.remote(request, replica=self._replica)
        self._pulling = asyncio.create_task(self._pull())
        head = await self._next()
        if not isinstance(head, CallHead):
            raise UpstreamFailed("the replica's answer has no head")
        self.status, self.headers, self.has_begun = head.status, head.headers, True

    async def read(self) -> bytes:
        """The next piece of the body; b"": that was all. UpstreamFailed when the answer breaks off before."""
        if self._is_complete:
            return b""
        part = await self._next()
        assert isinstance(part, bytes)
        self._is_complete = not part
        return part

    def abort(self, reason: str = "the connection was closed") -> None:
        """Cancel the call, which ends the request at its engine; who reads is told why."""
        if self._is_complete or self._error is not None:
            return
        self._error = UpstreamFailed(reason)
        if self._pulling is not None:
            self._pulling.cancel()
        if self._response is not None:
            self._response.cancel()
        while not self._parts.empty():
            self._parts.get_nowait()
        self._parts.put_nowait(None)

    async def _next(self) -> CallHead | bytes:
        if self._error is not None:
            raise self._error
        part = await self._parts.get()
        if part is None:
            assert self._error is not None
            raise self._error
        return part

    async def _pull(self) -> None:
        """Take what Ray brings, as long as it is read."""
        try:
            async for part in self._response:
                await self._parts.put(part)
            await self._parts.put(b"")
            return
        except ReplicaGone:
            error = UpstreamFailed("the replica has left", is_unreached=True)
        except Exception as why:  # an actor that died, a node that is away, or what the application raised
            error = UpstreamFailed(f"the call of the replica broke off: {type(why).__name__}")
        self._error = self._error or error
        await self._parts.put(None)
