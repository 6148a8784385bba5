"""/v1/requests/{id}: how far a request is, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, chat_body, joined, text_body
from tests.server.keyed import KeyedServer
from tests.server.process import SMOLLM2, ServerProcess, model_path
from tests.server.sse import DONE, events

pytestmark = pytest.mark.model
LONG = {"max_tokens": 1500, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


def test_a_running_stream_tells_its_progress_and_ends_when_it_is_cancelled(client: httpx.Client) -> None:
    with client.stream("POST", CHAT, json=chat_body(**LONG)) as response:
        read = events(response)
        chunk = next(read)
        seen = client.get(f"/v1/requests/{chunk['id']}").json()
        assert seen["id"] == response.headers["x-request-id"]
        assert seen["phase"] == "decode"
        assert seen["prompt_tokens"] == seen["prompt_tokens_computed"] > 0
        assert not seen["is_cancelled"]
        cancelled = client.delete(f"/v1/requests/{seen['id']}").json()
        assert cancelled["is_cancelled"]
        *others, usage, last = read
    assert last == DONE
    assert others[-1]["choices"][0]["finish_reason"] == "cancelled"
    assert 0 < usage["usage"]["completion_tokens"] < 1500
    assert joined(others)
    assert client.get(f"/v1/requests/{seen['id']}").status_code == 404


def test_an_unknown_request_is_404(client: httpx.Client) -> None:
    for method in ("GET", "DELETE"):
        response = client.request(method, "/v1/requests/nothing")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "request_not_found"


def test_requests_of_other_keys_are_not_to_be_seen(keyed: KeyedServer) -> None:
    body = text_body(**LONG | {"max_tokens": 400})
    with (
        keyed.client("fred") as mine,
        keyed.client("bert") as other,
        mine.stream("POST", TEXT, json=body) as response,
    ):
        read = events(response)  # kept: dropping it closes the connection
        next(read)
        request_id = response.headers["x-request-id"]
        assert mine.get(f"/v1/requests/{request_id}").status_code == 200
        for method in ("GET", "DELETE"):
            assert other.request(method, f"/v1/requests/{request_id}").status_code == 404
        assert not mine.get(f"/v1/requests/{request_id}").json()["is_cancelled"]
        assert mine.delete(f"/v1/requests/{request_id}").status_code == 200


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    config = "heartbeat_timeout_s = 120\n[engine]\nmax_running = 1\nmax_batch_tokens = 64\n"
    options = ("--model", model_path(SMOLLM2), "--context", "2048")
    with ServerProcess(*options, config=config, module="tests.server.faulty") as process, process.client() as http:
        http.post("/fault/slow?seconds=0.2")
        yield process


def test_queued_and_prefilling_requests_can_be_seen_and_cancelled(slow: ServerProcess) -> None:
    long = text_body("word " * 900, **LONG | {"max_tokens": 1000})
    with (
        slow.client() as http,
        http.stream("POST", TEXT, json=long) as prefilling,
        http.stream("POST", TEXT, json=text_body(**LONG)) as queued,
    ):
        first, second = (stream.headers["x-request-id"] for stream in (prefilling, queued))
        seen = _until(http, first, "prefill")
        assert seen["completion_tokens"] == 0
        assert 0 <= seen["prompt_tokens_computed"] < seen["prompt_tokens"]
        assert _until(http, second, "queued")["prompt_tokens_computed"] == 0
        http.delete(f"/v1/requests/{second}")
        http.delete(f"/v1/requests/{first}")
        for stream in (queued, prefilling):
            *_, choice, usage, last = events(stream)
            assert last == DONE
            assert choice["choices"][0]["finish_reason"] == "cancelled"
            assert usage["usage"]["completion_tokens"] == 0


def _until(http: httpx.Client, request_id: str, phase: str) -> dict[str, Any]:
    for _ in range(1000):
        seen: dict[str, Any] = http.get(f"/v1/requests/{request_id}").json()
        if seen["phase"] == phase:
            return seen
        time.sleep(0.02)
    raise AssertionError(f"the request never was in {phase}: {seen}")
