"""A model that denoises canvases of random tokens behind the API: it is served, and what it cannot do is said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.canvas_models import CANVASES, write_talking_canvases
from tests.server.process import ServerProcess
from tests.server.sse import DONE, events

pytest.importorskip("torch")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "seed": 5, "diffusion": {"steps": 3}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_canvases(tmp_path_factory.mktemp("served") / "tiny.gguf")


@pytest.fixture(scope="module")
def http(path: Path) -> Iterator[httpx.Client]:
    with ServerProcess("--model", f"tiny={path}") as server, server.client() as client:
        yield client


def text_of(http: httpx.Client, body: dict[str, Any]) -> str:
    with http.stream("POST", TEXT, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        *chunks, end = events(response)
    assert end == DONE
    return "".join(one["text"] for chunk in chunks for one in chunk["choices"])


def test_an_answer_comes_whole_and_in_pieces(http: httpx.Client) -> None:
    whole = http.post(TEXT, json=BODY).json()["choices"][0]["text"]
    assert text_of(http, BODY) == whole
    across = whole[6:10]  # canvases have 8 tokens
    expected = whole[: whole.index(across)]
    assert text_of(http, BODY | {"stop": [across]}) == expected
    assert http.post(TEXT, json=BODY | {"stop": [across]}).json()["choices"][0]["text"] == expected


def test_a_chat_is_answered(http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "ignore_eos": True}
    assert http.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("field", ["temperature", "logprobs"])
def test_what_has_no_meaning_is_refused_by_name(http: httpx.Client, field: str) -> None:
    response = http.post(TEXT, json=BODY | {field: 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize("context", [CANVASES[0] - 1, CANVASES[0]])
def test_a_context_without_room_for_a_canvas_is_refused_at_load(path: Path, context: int) -> None:
    command = [sys.executable, "-m", "kvarn.cli.main", "run", "--model", str(path), "--context", str(context), "hi"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"kvarn: the context has room for {context} tokens")
