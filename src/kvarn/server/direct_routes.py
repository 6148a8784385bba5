"""Calls the endpoints that many clients ask at once straight from the pipeline.

A router's match, FastAPI's dependencies and its stacks of contexts take as long as all of our own work for a short
prompt. The routes stay what they are: their signatures say what they take, and the document of the API is made of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_type_hints

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvarn.errors import KvarnError
from kvarn.server.dependencies import ServerPart, charged
from kvarn.server.http.pipeline import ResponseSender
from kvarn.server.state import ServerState

Endpoint = Callable[..., Awaitable[Response]]
Fail = Callable[[Request, Exception], Awaitable[Response]]
REQUEST = "request"  # the parameter of an endpoint that is Charged

_charged = asynccontextmanager(charged)


class DirectRoutes:
    """ASGI, within the pipeline: POST to some paths; passes everything else on."""

    def __init__(self, app: ASGIApp, state: ServerState, routes: Mapping[str, Endpoint], fail: Fail) -> None:
        self._app = app
        self._state = state
        self._routes = {path: (endpoint, _parts(endpoint)) for path, endpoint in routes.items()}
        self._fail = fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        assert isinstance(send, ResponseSender)
        http = Request(scope, receive, send)
        try:
            await self._answer(http, send, *route)
        except (KvarnError, HTTPException) as error:
            if send.status is not None:
                raise  # the server logs it and cuts the connection
            response = await self._fail(http, error)
            await response(scope, receive, send)

    async def _answer(self, http: Request, send: Send, endpoint: Endpoint, parts: Mapping[str, ServerPart]) -> None:
        """The request lets go of what it holds when the last byte is out."""
        async with _charged(http) as request:
            taken = {name: part.get(self._state) for name, part in parts.items()}
            response = await endpoint(request, **taken)
            await response(http.scope, http.receive, send)


def _parts(endpoint: Endpoint) -> dict[str, ServerPart]:
    """What an endpoint takes of the server beside its request, as its signature says."""
    hints: dict[str, Any] = get_type_hints(endpoint, include_extras=True)
    asked = {name: hint.__metadata__[0].dependency for name, hint in hints.items() if name != "return"}
    assert asked.pop(REQUEST) is charged, f"{endpoint} is not Charged"
    assert all(isinstance(part, ServerPart) for part in asked.values()), f"{endpoint} takes more than parts"
    return asked
