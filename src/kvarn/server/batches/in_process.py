"""Answers requests through the routes of the server without a socket: the same code, so the same bytes.

What stands before the routes stays outside: keys, the gate for many clients, the access log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from fastapi import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvarn.server.access.keys import Principal
from kvarn.server.api.field_names import NO_FIELDS
from kvarn.server.api.openai import chat_routes, completions_routes, embeddings_routes
from kvarn.server.api.responses import routes as responses
from kvarn.server.direct_routes import DirectRoutes, Endpoint
from kvarn.server.failures import failure_response
from kvarn.server.http.pipeline import (
    GIVEN_FIELDS,
    LOG_FIELDS,
    PRINCIPAL,
    RECEIVED_AT,
    REQUEST_ID,
    ResponseSender,
)
from kvarn.server.http.request_id import new_request_id
from kvarn.server.state import ServerState

ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": chat_routes.chat_completions,
    "/v1/completions": completions_routes.completions,
    "/v1/embeddings": embeddings_routes.embed,
    "/v1/responses": responses.create_response,
}


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """A whole response."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None  # it was refused for now


class InProcess:
    """Asks the endpoints of one server; each call is one request of a principal."""

    def __init__(self, state: ServerState) -> None:
        self._app = SimpleNamespace(state=SimpleNamespace(kvarn=state))
        self._tag = state.responses.tag
        self._routes = DirectRoutes(_nothing, state, ENDPOINTS, _fail)

    async def ask(self, principal: Principal, url: str, body: bytes) -> BatchAnswer:
        """The response to a body; failures are responses too."""
        request_id = new_request_id(self._tag)
        sent: list[Message] = []
        scope = self._scope(principal, url, request_id)
        receive = _Body(body)

        async def send(message: Message) -> None:
            sent.append(message)

        sender = ResponseSender(send, [])
        try:
            await self._routes(scope, receive, sender)
        except Exception as error:
            sent.clear()
            await failure_response(error, url, request_id)(scope, receive, send)
        headers = dict(sent[0]["headers"])
        retry = headers.get(b"retry-after")
        content = b"".join(message.get("body", b"") for message in sent[1:])
        return BatchAnswer(sent[0]["status"], request_id, content, None if retry is None else float(retry))

    def _scope(self, principal: Principal, url: str, request_id: str) -> Scope:
        return {
            "type": "http",
            "method": "POST",
            "path": url,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "app": self._app,
            REQUEST_ID: request_id,
            PRINCIPAL: principal,
            RECEIVED_AT: time.monotonic(),
            LOG_FIELDS: {},
        }


class _Body:
    """receive() of a client that sends its body and then waits for the answer."""

    def __init__(self, body: bytes) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def __call__(self) -> Message:
        if self._message is None:
            await asyncio.get_running_loop().create_future()  # until it is cancelled
        message, self._message = self._message, None
        assert message is not None
        return message


async def _fail(http: Request, error: Exception) -> Response:
    scope = http.scope
    return failure_response(
        error, scope["path"], scope[REQUEST_ID], scope[LOG_FIELDS], scope.get(GIVEN_FIELDS, NO_FIELDS)
    )


async def _nothing(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError(f"no batch goes to {scope['path']}")
