"""How /v1/responses, /v1/messages and /v1/embeddings end when an answer cannot: deadlines, faults, cancellation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.keyed import KeyedServer
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path
from tests.server.sse import events

pytestmark = pytest.mark.model
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
STORY = "Write a long story about a mill."


def asked(path: str, **fields: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"model": SMOLLM2, "input": STORY, "max_output_tokens": 400, "temperature": 0, **fields}
    messages = [{"role": "user", "content": STORY}]
    return {"model": SMOLLM2, "messages": messages, "max_tokens": 400, "temperature": 0, **fields}


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    models = ["--model", model_path(SMOLLM2), "--context", "1024"]
    with ServerProcess(*models, config="request_timeout_s = 2.0\n", module="tests.server.faulty") as process:
        yield process


@pytest.fixture
def http(slow: ServerProcess) -> Iterator[httpx.Client]:
    with slow.client() as http:
        yield http
        http.post("/fault/slow?seconds=0")


def streamed(http: httpx.Client, path: str) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=asked(path, stream=True)) as response:
        assert response.status_code == 200
        return list(events(response))


def test_a_deadline_ends_a_stream_of_messages_with_an_error_event(http: httpx.Client) -> None:
    http.post("/fault/slow?seconds=0.2")
    *told, last = streamed(http, MESSAGES)
    assert last["type"] == "error"
    assert last["error"]["type"] == "timeout_error"
    assert "content_block_delta" in {event["type"] for event in told}
    assert "message_stop" not in {event["type"] for event in told}


def test_a_deadline_ends_a_stream_of_responses_with_a_failed_one(http: httpx.Client) -> None:
    http.post("/fault/slow?seconds=0.2")
    *told, last = streamed(http, RESPONSES)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "deadline_exceeded"
    assert last["sequence_number"] == len(told)
    said = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
    assert last["response"]["output"][0]["content"][0]["text"] == said


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_deadline_refuses_a_whole_answer(http: httpx.Client, path: str) -> None:
    http.post("/fault/slow?seconds=0.2")
    response = http.post(path, json=asked(path))
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_failing_pass_ends_a_stream_and_tells_nothing_inner(http: httpx.Client, path: str) -> None:
    http.post("/fault/raise?step=3&count=2")  # a pass is tried twice
    *_, last = streamed(http, path)
    assert "injected" not in json.dumps(last)
    error = last["error"] if path == MESSAGES else last["response"]["error"]
    assert error.get("type") == "api_error" or error.get("code") == "internal_error"


def test_a_cancelled_message_is_an_error(http: httpx.Client) -> None:
    http.post("/fault/slow?seconds=0.05")
    with http.stream("POST", MESSAGES, json=asked(MESSAGES, stream=True)) as response:
        read = events(response)
        started = next(read)
        assert http.delete(f"/v1/requests/{started['message']['id']}").status_code == 200
        *_, last = read
    assert last["type"] == "error"
    assert "cancelled" in last["error"]["message"]


def test_a_cancelled_response_is_incomplete_and_keeps_what_was_said(http: httpx.Client) -> None:
    http.post("/fault/slow?seconds=0.05")
    with http.stream("POST", RESPONSES, json=asked(RESPONSES, stream=True)) as response:
        read = events(response)
        told = [next(read) for _ in range(6)]
        assert http.delete(f"/v1/requests/{told[0]['response']['id']}").status_code == 200
        told += read
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
    assert told[-1]["response"]["output"][0]["content"][0]["text"]


def test_embeddings_are_paid_for_by_the_token_and_refused_when_there_are_none_left(keyed: KeyedServer) -> None:
    with keyed.process.client(headers={"x-api-key": keyed.keys["embedder"]}) as client:
        body = {"model": MINILM, "input": "word " * 60}
        first = client.post("/v1/embeddings", json=body)
        assert first.status_code == 200, first.text
        used = first.json()["usage"]["total_tokens"]
        assert used == 62
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == 120 - used
        second = client.post("/v1/embeddings", json=body)
        assert second.status_code == 429
        assert int(second.headers["retry-after"]) >= 1
        assert second.json()["error"]["code"] == "rate_limit_exceeded"
        refused = client.post(MESSAGES, json=asked(MESSAGES, max_tokens=50))
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"


def test_looking_at_tokens_counts_as_a_request(keyed: KeyedServer) -> None:
    with keyed.client("reader") as client:
        codes = [client.post("/tokenize", json={"prompt": "x"}).status_code for _ in range(4)]
    assert codes == [200, 200, 200, 429]
