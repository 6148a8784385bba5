"""A server that is behind sends several tokens in one event: in every dialect the same text, usage and calls."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.chat_model import write_chat_model
from tests.server.edge_client import until
from tests.server.process import ServerProcess
from tests.server.sse import DONE, events
from tests.server.test_infill import FIM

CHAT, TEXT, INFILL = "/v1/chat/completions", "/v1/completions", "/infill"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NUM_TOKENS = 60
STEP_S, BEHIND_S = 0.003, 0.06
ASKED = [{"role": "user", "content": "grüße"}]
TOOL = {"name": "mill", "parameters": {"type": "object", "properties": {"grain": {"enum": ["rye", "wheat"]}}}}
TOOL["parameters"] |= {"required": ["grain"], "additionalProperties": False}  # type: ignore[operator]


@dataclass(frozen=True)
class Dialect:
    """How one API is asked, and where text and tokens lie in its answers."""

    path: str
    body: dict[str, Any]
    text: Callable[[dict[str, Any]], str]  # of an event, or of a whole answer
    num_tokens: Callable[[dict[str, Any]], int | None]  # where an event or answer tells it


def _chat_text(one: dict[str, Any]) -> str:
    messages = [choice.get("delta", choice.get("message")) for choice in one["choices"]]
    return "".join(message.get("content") or "" for message in messages)


def _usage(one: dict[str, Any], name: str = "completion_tokens") -> int | None:
    return (one.get("usage") or {}).get(name)


def _message_text(one: dict[str, Any]) -> str:
    if one["type"] == "message":
        return "".join(block["text"] for block in one["content"])
    return str(one["delta"]["text"]) if one["type"] == "content_block_delta" else ""


def _response_text(one: dict[str, Any]) -> str:
    if "output" in one:
        return "".join(part["text"] for item in one["output"] for part in item["content"])
    return str(one["delta"]) if one["type"] == "response.output_text.delta" else ""


STREAM = {"stream_options": {"include_usage": True}}
GREEDY = {"model": "coder", "temperature": 0}
ENDLESS = {"logit_bias": {"256": -100}}  # no end of its own
DIALECTS = {
    "chat": Dialect(CHAT, GREEDY | ENDLESS | {"messages": ASKED, "max_tokens": NUM_TOKENS}, _chat_text, _usage),
    "completions": Dialect(
        TEXT,
        GREEDY | ENDLESS | {"prompt": "grüße", "max_tokens": NUM_TOKENS},
        lambda one: "".join(choice["text"] for choice in one["choices"]),
        _usage,
    ),
    "messages": Dialect(
        MESSAGES,
        GREEDY | {"messages": ASKED, "max_tokens": NUM_TOKENS},
        _message_text,
        lambda one: _usage(one, "output_tokens") if one["type"] in ("message", "message_delta") else None,
    ),
    "responses": Dialect(
        RESPONSES,
        GREEDY | {"input": "grüße", "max_output_tokens": NUM_TOKENS, "store": False},
        _response_text,
        lambda one: _usage(one.get("response", one), "output_tokens"),
    ),
    "infill": Dialect(
        INFILL,
        GREEDY | ENDLESS | {"input_prefix": "grüße", "input_suffix": "x", "n_predict": NUM_TOKENS},
        lambda one: str(one["content"]),
        lambda one: one.get("tokens_predicted"),
    ),
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = write_chat_model(tmp_path_factory.mktemp("models") / "coder", **FIM)
    with ServerProcess("--model", model, "--context", "2048", module="tests.server.faulty") as running:
        with running.client() as http:
            http.post(f"/fault/slow?seconds={STEP_S}")
        yield running


@pytest.fixture
def http(process: ServerProcess) -> Iterator[httpx.Client]:
    with process.client() as client:
        yield client
        client.post("/fault/behind?seconds=0")


def streamed(http: httpx.Client, dialect: Dialect, **fields: Any) -> list[dict[str, Any]]:
    more = STREAM if dialect.path in (CHAT, TEXT) else {}
    body = dialect.body | {"stream": True} | more | fields
    with http.stream("POST", dialect.path, json=body) as response:
        assert response.status_code == 200, response.read()
        return [event for event in events(response) if event != DONE]


def whole(http: httpx.Client, dialect: Dialect, **fields: Any) -> dict[str, Any]:
    response = http.post(dialect.path, json=dialect.body | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def compared(http: httpx.Client, dialect: Dialect, **fields: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events with text of a stream as usual and of one that is behind, after both were found right."""
    answer = whole(http, dialect, **fields)
    usual = streamed(http, dialect, **fields)
    http.post(f"/fault/behind?seconds={BEHIND_S}")
    behind = streamed(http, dialect, **fields)
    for read in (usual, behind):
        assert "".join(map(dialect.text, read)) == dialect.text(answer)
        told = [count for count in map(dialect.num_tokens, read) if count is not None]
        assert told[-1] == dialect.num_tokens(answer)
    with_text = [[event for event in read if dialect.text(event)] for read in (usual, behind)]
    return with_text[0], with_text[1]


@pytest.mark.parametrize("name", DIALECTS)
def test_the_text_and_the_usage_are_the_same_in_fewer_events(http: httpx.Client, name: str) -> None:
    usual, behind = compared(http, DIALECTS[name])
    assert len(behind) <= max(4, len(usual) / 3)


@pytest.mark.parametrize("name", ["chat", "completions"])
def test_a_stop_string_of_several_tokens_ends_the_text_at_the_same_place(http: httpx.Client, name: str) -> None:
    dialect = DIALECTS[name]
    text = dialect.text(whole(http, dialect))
    stop = next(text[at : at + 3] for at in range(20, len(text) - 3) if "\ufffd" not in text[at : at + 3])
    usual, behind = compared(http, dialect, stop=[stop])
    said = "".join(map(dialect.text, behind))
    assert said == text[: text.find(stop)]
    assert len(behind) < len(usual)


@pytest.mark.parametrize("name", ["chat", "completions"])
def test_there_are_as_many_logprobs_as_tokens(http: httpx.Client, name: str) -> None:
    dialect = DIALECTS[name]
    asked = {"logprobs": True, "top_logprobs": 1} if name == "chat" else {"logprobs": 1}
    http.post(f"/fault/behind?seconds={BEHIND_S}")
    read, answer = streamed(http, dialect, **asked), whole(http, dialect, **asked)
    field = "content" if name == "chat" else "token_logprobs"
    parts = [choice["logprobs"][field] for event in read for choice in event["choices"] if choice["logprobs"]]
    scores = [score for part in parts for score in part]
    assert len(scores) == NUM_TOKENS
    assert scores == answer["choices"][0]["logprobs"][field]


def test_usage_in_every_chunk_counts_the_tokens_told_so_far(http: httpx.Client) -> None:
    http.post(f"/fault/behind?seconds={BEHIND_S}")
    options = {"include_usage": True, "continuous_usage_stats": True}
    read = streamed(http, DIALECTS["completions"], stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in read]
    assert counts == sorted(counts)
    assert counts[-1] == NUM_TOKENS
    assert len(set(counts)) < NUM_TOKENS / 3


def test_a_tool_call_is_the_same(http: httpx.Client) -> None:
    tools = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "max_tokens": 200}
    dialect = DIALECTS["chat"]
    body = {name: value for name, value in dialect.body.items() if name != "logit_bias"} | tools
    (choice,) = http.post(CHAT, json=body).json()["choices"]
    wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert wanted
    for seconds in (0, BEHIND_S):
        http.post(f"/fault/behind?seconds={seconds}")
        with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
            chunks = [event for event in events(response) if event != DONE]
        parts = [part for event in chunks for part in event["choices"][0]["delta"].get("tool_calls", ())]
        names = {part["index"]: part["function"]["name"] for part in parts if "name" in part["function"]}
        pieces: dict[int, str] = dict.fromkeys(names, "")
        for part in parts:
            pieces[part["index"]] += part["function"]["arguments"]
        assert [(names[index], pieces[index]) for index in sorted(names)] == wanted
        assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_several_choices_and_prompts_keep_apart(http: httpx.Client) -> None:
    body = DIALECTS["completions"].body | {"prompt": ["a", "bc"], "n": 2, "temperature": 1.0, "seed": 5}
    answer = http.post(TEXT, json=body).json()
    http.post(f"/fault/behind?seconds={BEHIND_S}")
    said = ["", "", "", ""]
    with http.stream("POST", TEXT, json=body | {"stream": True}) as response:
        for event in events(response):
            for choice in event["choices"] if event != DONE else ():
                said[choice["index"]] += choice["text"]
    assert said == [choice["text"] for choice in answer["choices"]]


def test_without_a_reason_every_token_is_an_event(http: httpx.Client) -> None:
    text = GREEDY | {"prompt": "a", "max_tokens": NUM_TOKENS, "logit_bias": {"65": 100}, "stream": True}
    with http.stream("POST", TEXT, json=text) as response:
        read = [event["choices"][0]["text"] for event in events(response) if event != DONE]
    assert "".join(read) == "A" * NUM_TOKENS
    assert sum(one == "A" for one in read) >= 0.7 * NUM_TOKENS, "the machine may be late at times, not as a rule"


def test_one_who_leaves_while_the_server_is_behind_is_cancelled(process: ServerProcess, http: httpx.Client) -> None:
    http.post(f"/fault/behind?seconds={BEHIND_S}")
    body = DIALECTS["completions"].body | {"max_tokens": 1900}
    with http.stream("POST", TEXT, json=body | {"stream": True}) as response:
        next(events(response))
    until(lambda: http.get("/fault/state").json()["running"] == 0)


def test_one_who_does_not_read_keeps_nobody_waiting(process: ServerProcess, http: httpx.Client) -> None:
    content = json.dumps(DIALECTS["completions"].body | {"max_tokens": 1900, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
    head += "content-type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", process.port)) as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.sendall(head.encode() + content)
        until(lambda: http.get("/fault/state").json()["running"] == 1)
        read = streamed(http, DIALECTS["completions"])
    assert DIALECTS["completions"].num_tokens(read[-1]) == NUM_TOKENS
    until(lambda: http.get("/fault/state").json()["running"] == 0)
