"""Texts of megabytes: refused after the tokens that say so, and nobody else waits meanwhile.

Found so: one such request of a free key kept the interpreter for half a minute, and the watchdog ended the server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, chat_body, refusal, text_body
from tests.server.process import MINILM, SMOLLM2, ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("unchanged")]

LONG = " ".join(f"w{number}" for number in range(600_000))[:4_000_000]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": LONG})}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = [{**TOOL, "function": {**TOOL["function"], "name": f"f{n}", "description": LONG[:16_000]}} for n in range(128)]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": (TEXT, text_body(LONG)),
    "a text without spaces": (TEXT, text_body(LONG.replace(" ", "!"))),
    "a text to be cut": (TEXT, text_body(LONG, truncate="left")),
    "a chat": (CHAT, chat_body(LONG)),
    "a chat to be cut": (CHAT, chat_body(LONG, truncate="left")),
    "arguments of a call": (
        CHAT,
        chat_body() | {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}]},
    ),
    "tools": (CHAT, chat_body(tools=TOOLS)),
    "a text to count": ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    "a chat to count": ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    "a text to embed": ("/v1/embeddings", {"model": MINILM, "input": LONG}),
    "a document to judge": ("/rerank", {"model": SMOLLM2, "query": "x", "documents": [LONG]}),
}


@contextmanager
def watched(server: ServerProcess) -> Iterator[list[float]]:
    """Seconds that /health/live took meanwhile."""
    took: list[float] = []
    is_over = threading.Event()

    def look() -> None:
        with server.client() as client:
            while not took or not is_over.is_set():  # once at least, however soon it is over
                before = time.monotonic()
                assert client.get("/health/live").status_code == 200
                took.append(time.monotonic() - before)
                is_over.wait(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    yield took
    is_over.set()
    thread.join()


@pytest.mark.parametrize("what", ASKED)
def test_a_hopelessly_long_text_is_refused_soon_and_holds_nobody_up(
    server: ServerProcess, client: httpx.Client, what: str, patience: float
) -> None:
    path, body = ASKED[what]
    began = time.monotonic()
    with watched(server) as took:
        error = refusal(client, path, body)
    assert error["code"] == "context_length_exceeded"
    assert len(error["message"]) < 200
    assert time.monotonic() - began < 1.0 * patience
    assert max(took) < 0.5 * patience
