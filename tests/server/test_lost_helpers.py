"""Helper processes that are killed or stopped from outside: no client is blamed for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.children import child_ids
from tests.server.edge_client import until
from tests.server.keyed import chat_body
from tests.server.process import SMOLLM2, ServerProcess, model_path

pytestmark = pytest.mark.model

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
RENDERER, SANDBOX = "template_child.py", "grammar_sandbox_child.py"
LOST = [signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model", model_path(SMOLLM2), "--context", "1024") as process:
        yield process


@contextmanager
def struck(server: ServerProcess, script: str, signum: int, number: int) -> Iterator[set[int]]:
    """Each of the next helper processes gets a signal as soon as it is seen, but no more than number of them."""
    hit: set[int] = set()
    is_over = threading.Event()

    def strike() -> None:
        while not is_over.is_set() and len(hit) < number:
            for pid in set(child_ids(script, server.pid)) - hit:
                hit.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    there = set(child_ids(script, server.pid))
    striker = threading.Thread(target=strike)
    striker.start()
    until(lambda: there <= hit)  # or one of them might serve what is asked now
    try:
        yield hit
    finally:
        is_over.set()
        striker.join()


def ask(server: ServerProcess, text: str, **fields: Any) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/chat/completions", json=chat_body(text, **fields))


def with_schema(name: str) -> dict[str, Any]:
    """Another one each time: none is compiled already."""
    schema = {**SCHEMA, "required": ["a", name], "properties": {**SCHEMA["properties"], name: {"type": "null"}}}  # type: ignore[dict-item]
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}}


@pytest.mark.parametrize("signum", LOST)
def test_a_renderer_that_is_lost_is_replaced_unnoticed(server: ServerProcess, signum: int) -> None:
    ask(server, "warm")
    (pid,) = child_ids(RENDERER, server.pid)
    os.kill(pid, signum)
    assert ask(server, "hi").status_code == 200
    assert pid not in child_ids(RENDERER, server.pid)


@pytest.mark.parametrize("signum", LOST)
def test_a_renderer_that_is_lost_twice_is_told_as_503(server: ServerProcess, signum: int) -> None:
    with struck(server, RENDERER, signum, 100) as hit:
        refused = ask(server, "hi")
    check_unavailable(refused)
    assert len(hit) >= 2
    assert ask(server, "hi").status_code == 200


@pytest.mark.parametrize("signum", LOST)
def test_a_sandbox_that_is_lost_is_replaced_unnoticed(server: ServerProcess, signum: int) -> None:
    with struck(server, SANDBOX, signum, 1) as hit:
        answer = ask(server, "hi", **with_schema(f"once{signum}"))
    assert answer.status_code == 200, answer.text
    assert len(hit) == 1


@pytest.mark.parametrize("signum", LOST)
def test_a_sandbox_that_is_lost_twice_is_told_as_503(server: ServerProcess, signum: int) -> None:
    with struck(server, SANDBOX, signum, 100) as hit:
        refused = ask(server, "hi", **with_schema(f"twice{signum}"))
    check_unavailable(refused)
    assert len(hit) == 2
    assert ask(server, "hi", **with_schema(f"twice{signum}")).status_code == 200


def check_unavailable(refused: httpx.Response) -> None:
    assert refused.status_code == 503, refused.text
    error = refused.json()["error"]
    assert error["code"] == "helper_unavailable"
    assert error["type"] == "api_error"
    assert refused.headers["retry-after"] == "1"
