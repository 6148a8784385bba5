"""What the tests of the official clients ask for, and how they look at the answers."""

from __future__ import annotations

import time
from typing import Any

import httpx
from pydantic import BaseModel

from tests.server.process import ServerProcess

QUESTION = "Name one color of the sky."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


class Verdict(BaseModel):
    """What the model shall say."""

    warm: bool


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def follows(value: Any) -> None:
    assert set(value) == {"city", "warm"}
    assert value["city"] in ("Paris", "Oslo")
    assert isinstance(value["warm"], bool)


def wait_until_ended(server: ServerProcess, request_id: str, timeout_s: float) -> None:
    """The server forgets a request when it has ended."""
    deadline = time.monotonic() + timeout_s
    with server.client() as http:
        while http.get(f"/v1/requests/{request_id}").status_code != httpx.codes.NOT_FOUND:
            assert time.monotonic() < deadline, "the request still runs"
            time.sleep(0.05)
