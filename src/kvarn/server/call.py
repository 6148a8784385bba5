"""One authenticated request on its way through the server. Whatever it takes it gives back when the response is out."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from starlette.responses import Response

from kvarn.server.body import read_json

if TYPE_CHECKING:
    from kvarn.server.generation import Generation
    from kvarn.server.keys import Principal
    from kvarn.server.shelf import ServedModel
    from kvarn.server.state import ServerState


class Call:
    """What a route needs to know about its caller, and what the caller holds: models in use and a generation."""

    def __init__(self, http: Request) -> None:
        self.http = http
        self.received_at = time.monotonic()
        self.state: ServerState = http.app.state.kvarn
        self.principal: Principal = http.scope["kvarn.principal"]
        self.id: str = http.scope.get("kvarn.request_id") or new_request_id()
        self.headers: dict[str, str] = {}  # of the response: what is left of each limit
        self.generation: Generation | None = None  # the one that runs, once there is one
        self._held = AsyncExitStack()

    async def json(self) -> dict[str, Any]:
        """The body, read and checked within the server's limits."""
        return await read_json(self.http, self.state.config)

    async def use_model(self, name: str) -> ServedModel:
        """A loaded model, which stays loaded until the response is out; ModelNotFound for unknown names."""
        return await self._held.enter_async_context(self.state.shelf.use(name))

    def reply(self, payload: Mapping[str, Any]) -> Response:
        """A JSON response with the caller's headers."""
        content = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
        return Response(content, headers=self.headers, media_type="application/json")

    async def close(self) -> None:
        """End what still runs and give everything back."""
        if self.generation is not None:
            self.generation.close()
            self.generation = None
        await self._held.aclose()


def new_request_id() -> str:
    """An id nobody can guess: who knows it may look at the request, if it is the same key's."""
    return secrets.token_hex(16)


async def _called(http: Request) -> AsyncIterator[Call]:
    call = Call(http)
    try:
        yield call
    finally:  # FastAPI comes here after the last byte, also when the client went away
        await call.close()


Called = Annotated[Call, Depends(_called)]
