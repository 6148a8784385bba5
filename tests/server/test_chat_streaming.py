"""/v1/chat/completions as a stream: the same answer in pieces, and a proper end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, answer, chat_body, chunks, joined, refusal, text_body
from tests.server.process import SMOLLM2, ServerProcess, model_path
from tests.server.sse import DONE, events

pytestmark = pytest.mark.model


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1.0, "seed": 5}, {"stop": "a"}, {"logprobs": True}])
def test_a_stream_adds_up_to_the_whole_answer(client: httpx.Client, fields: dict[str, Any]) -> None:
    body = chat_body(max_tokens=12, **fields)
    whole = answer(client, CHAT, body)
    read = chunks(client, CHAT, body)
    for choice in whole["choices"]:
        own = [one for chunk in read for one in chunk["choices"] if one["index"] == choice["index"]]
        assert joined(read, choice["index"]) == choice["message"]["content"]
        assert own[0]["delta"]["role"] == "assistant"
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [choice["finish_reason"]]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        scores = [entry for one in own if one["logprobs"] for entry in one["logprobs"]["content"]]
        assert scores == (choice["logprobs"] or {"content": []})["content"]


def test_all_chunks_have_the_same_heading(client: httpx.Client) -> None:
    read = chunks(client, CHAT, chat_body())
    headings = {(one["id"], one["object"], one["created"], one["model"], one["system_fingerprint"]) for one in read}
    assert len(headings) == 1
    assert read[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (TEXT, text_body())])
def test_the_end_of_a_stream_is_sent_in_one_piece(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    wanted = body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=wanted) as response:
        last = list(response.iter_raw())[-1]
    assert b'"finish_reason":"' in last
    assert b'"choices":[],"usage":{' in last
    assert last.endswith(b"data: [DONE]\n\n")


def test_usage_comes_in_a_chunk_of_its_own_when_it_is_wanted(client: httpx.Client) -> None:
    body = chat_body()
    *others, last = chunks(client, CHAT, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"].keys() == {"cached_tokens"}
    assert all(chunk["usage"] is None for chunk in others)
    assert all("usage" not in chunk for chunk in chunks(client, CHAT, body))


def test_a_streamed_tool_call_adds_up_to_the_whole_one(client: httpx.Client) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    body = chat_body("Weather in Oslo?", max_tokens=96, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (whole,) = answer(client, CHAT, body)["choices"][0]["message"]["tool_calls"]
    read = chunks(client, CHAT, body)
    deltas = [choice["delta"] for chunk in read for choice in chunk["choices"]]
    first, *others = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert first["function"]["name"] == whole["function"]["name"]
    assert first["id"]
    arguments = first["function"]["arguments"] + "".join(call["function"]["arguments"] for call in others)
    assert json.loads(arguments) == json.loads(whole["function"]["arguments"])
    assert read[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_what_is_wrong_with_a_request_is_told_before_the_stream_begins(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat_body(stream=True, max_tokens=100_000))
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    options = ["--model", model_path(SMOLLM2), "--context", "2048"]
    config = 'ping_s = 0.2\nrequest_timeout_s = 3.0\nheartbeat_timeout_s = 120\nunknown_fields = "ignore"\n'
    with ServerProcess(*options, config=config, module="tests.server.faulty") as process:
        yield process


@pytest.fixture
def http(slow: ServerProcess) -> Iterator[httpx.Client]:
    with slow.client() as http:
        yield http
        http.post("/fault/slow?seconds=0")


def test_silence_is_filled_with_comments_that_tell_the_progress(http: httpx.Client) -> None:
    http.post("/fault/slow?seconds=0.7")
    with http.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=1)) as response:
        lines = list(response.iter_lines())
    comments = [line for line in lines if line.startswith(":")]
    assert len(comments) >= 2
    assert all("prompt tokens" in line for line in comments)
    assert lines.index(comments[0]) < next(i for i, line in enumerate(lines) if line.startswith("data:"))


def test_a_deadline_ends_a_stream_with_an_error_event(http: httpx.Client) -> None:
    http.post("/fault/slow?seconds=0.3")
    with http.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=100)) as response:
        *read, error, last = events(response)
    assert last == DONE
    assert error["error"]["code"] == "deadline_exceeded"
    assert joined(read)
    assert all(choice["finish_reason"] is None for chunk in read for choice in chunk["choices"])


def test_a_deadline_refuses_a_whole_answer(http: httpx.Client) -> None:
    http.post("/fault/slow?seconds=0.3")
    response = http.post(TEXT, json=text_body(max_tokens=100))
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


def test_a_failing_pass_ends_a_stream_with_an_error_event_that_tells_nothing_inner(
    http: httpx.Client, slow: ServerProcess
) -> None:
    # The pass of a single request is tried twice, then that request has failed.
    http.post("/fault/raise?step=3&count=2")
    with http.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=50)) as response:
        *_, error, last = events(response)
    assert last == DONE
    assert error["error"]["code"] == "internal_error"
    assert "injected" not in json.dumps(error)
    assert "injected" in slow.log
    assert answer(http, CHAT, chat_body())["choices"]


def test_a_failing_pass_makes_a_whole_answer_a_500_in_the_usual_shape(http: httpx.Client) -> None:
    http.post("/fault/raise?step=1&count=2")
    response = http.post(CHAT, json=chat_body())
    assert response.status_code == 500
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert "injected" not in response.text


def test_tokens_of_one_stream_arrive_while_the_answer_is_written(http: httpx.Client) -> None:
    http.post("/fault/slow?seconds=0.1")
    arrivals = []
    with http.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=5)) as response:
        for event in events(response):
            if event != DONE and event["choices"][0]["delta"].get("content"):
                arrivals.append(time.monotonic())
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert len(gaps) >= 3
    assert min(gaps) > 0.05


def test_unknown_fields_are_ignored_when_the_operator_says_so(http: httpx.Client) -> None:
    message = {"role": "user", "content": "Name three colours.", "mood": "good"}
    plain = answer(http, CHAT, chat_body())["choices"]
    assert answer(http, CHAT, chat_body(max_new_tokens=7) | {"messages": [message]})["choices"] == plain
    hinted = http.post(CHAT, json=chat_body(verbosity="low"))  # known, and not honoured
    assert hinted.json()["choices"] == plain
    assert hinted.headers["x-kvarn-warning"] == "ignored: verbosity"
    refusal(http, CHAT, chat_body(web_search_options={}))
    refusal(http, CHAT, chat_body(temperature="high"))
