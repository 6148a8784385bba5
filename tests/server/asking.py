"""Bodies that tests of the chat and completion routes begin from, and what they look for in answers."""

from __future__ import annotations

from typing import Any

import httpx

from tests.server.process import SMOLLM2
from tests.server.sse import DONE, events

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat_body(content: Any = "Name three colours.", **fields: Any) -> dict[str, Any]:
    """A short greedy chat; fields replace and add."""
    body = {"model": SMOLLM2, "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    return body | fields


def text_body(prompt: Any = "The sky is", **fields: Any) -> dict[str, Any]:
    """A short greedy completion; fields replace and add."""
    return {"model": SMOLLM2, "prompt": prompt, "max_tokens": 6, "temperature": 0} | fields


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a request that must succeed."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    parsed: dict[str, Any] = response.json()
    return parsed


def refusal(client: httpx.Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error object of a request that must be refused, in OpenAI's shape."""
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def chunks(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a stream that must succeed and end with [DONE]."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        *read, last = events(response)
    assert last == DONE
    return read


def joined(read: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [choice for chunk in read for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices)
