"""`python -m tests.page.scripted serve ...`: the real server, which says what it is told to. Only for tests.

A chat whose last message begins with one of these words is answered by a script instead of the model:
    say: TEXT    TEXT, in pieces
    often: N TEXT  a paragraph of TEXT, N times
    slow: N TEXT   TEXT, and N seconds before its end
    cite: TEXT   TEXT, with a source numbered 1
    lost: TEXT   TEXT, and then the connection breaks
    busy: N      429 with Retry-After N
    call: NAME ARGUMENTS  a call of the tool NAME, its arguments in pieces; ...
    calls: JSON  ... or several, [[NAME, ARGUMENTS], ...]
Everything else is the server itself, with the routes of tests/server/faulty.py.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarn.server.process import serve as serving
from kvarn.server.state import ServerState
from tests.server.faulty import FaultRoutes

PIECE = 11  # characters of one event, ...
MAX_PIECES = 30_000  # ... more of a text that would have more events than these
CITATION = {
    **{"number": 1, "id": "mill.md#0", "document": "mill.md", "source": "mill.md", "lines": {"first": 3, "last": 4}},
    "text": "The millstone of Vrigstad weighs 812 kilograms.\nIt was cut in 1904 and dressed every winter since.",
}
EVENT_STREAM = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"scripted")]


class ScriptedChats:
    """ASGI: answers chats that begin with a word of a script, passes everything else on."""

    def __init__(self, state: ServerState, app: ASGIApp) -> None:
        self._app = FaultRoutes(state, app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/chat/completions":
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        word, _, text = json.loads(body)["messages"][-1]["content"].partition(": ")
        if word in ("say", "lost"):
            await _say(send, text, breaks=word == "lost")
        elif word == "often":
            number, _, part = text.partition(" ")
            await _say(send, f"{part}\n\n" * int(number), breaks=False)
        elif word == "slow":
            seconds, _, part = text.partition(" ")
            await _say(send, part, breaks=False, pause_s=float(seconds))
        elif word == "cite":
            await _say(send, text, breaks=False, retrieval={"citations": [CITATION], "left_out": [], "refused": False})
        elif word == "busy":
            await _refuse(send, text)
        elif word in ("call", "calls"):
            await _call(send, json.loads(text) if word == "calls" else [text.split(" ", 1)])
        else:
            await self._app(scope, _again(body, receive), send)


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _say(
    send: Send, text: str, *, breaks: bool, pause_s: float = 0.0, retrieval: dict[str, Any] | None = None
) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
    if retrieval is not None:
        await _event(send, {"choices": [], "retrieval": retrieval})
    piece = max(PIECE, len(text) // MAX_PIECES)
    for start in range(0, len(text), piece):
        delta = {"content": text[start : start + piece]}
        await _event(send, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    if breaks:
        await asyncio.sleep(1.0)  # what was sent is read before the end: a browser drops what it has not read by then
        raise ConnectionResetError("the script breaks the connection here")
    await asyncio.sleep(pause_s)
    await _end(send, "stop")


async def _call(send: Send, calls: list[list[str]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
    for index, (name, arguments) in enumerate(calls):
        begun = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        rest = [
            {"index": index, "function": {"arguments": arguments[at : at + PIECE]}}
            for at in range(0, len(arguments), PIECE)
        ]
        for piece in (begun, *rest):
            await _event(send, {"choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}]})
    await _end(send, "tool_calls")


async def _end(send: Send, reason: str) -> None:
    await _event(send, {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    await _event(send, {"choices": [], "usage": usage})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _event(send: Send, event: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": f"data: {json.dumps(event)}\n\n".encode(), "more_body": True})


async def _refuse(send: Send, seconds: str) -> None:
    error = {"message": "too many requests", "type": "rate_limit_error", "code": "rate_limit_exceeded"}
    headers = [(b"content-type", b"application/json"), (b"retry-after", seconds.encode())]
    await send({"type": "http.response.start", "status": 429, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


def main() -> None:
    """Run the command line with the server extended."""
    from kvarn.cli.main import main as run

    serving.serve = partial(serving.serve, extend=ScriptedChats)
    run()


if __name__ == "__main__":
    main()
