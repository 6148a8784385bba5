"""Prompts, messages and models that cannot be used: refused by name, without repeating what was said."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, answer, chat_body, chunks, joined, refusal, text_body
from tests.server.field_table import FIELDS
from tests.server.process import SMOLLM2

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("unchanged")]
VOCABULARY = 49_152


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [""], [[]], ["a", ""], [-1], [VOCABULARY], [2**31], [[1], [-1]], [1.5], [True], [None], {}, 5, None),
        *(["a", 1], [1, "a"], ["a", [1]], [[1], "a"], [["a"]], [[[1]]], [{}], True),
    ],
    ids=lambda prompt: json.dumps(prompt)[:30],
)
def test_bad_prompts_are_refused(client: httpx.Client, prompt: Any) -> None:
    error = refusal(client, TEXT, text_body(prompt))
    assert error["param"] == "prompt" or "prompt" in error["message"]


def test_more_prompts_than_the_queue_holds_are_refused(client: httpx.Client) -> None:
    assert "256" in refusal(client, TEXT, text_body(["a"] * 2048, max_tokens=1))["message"]
    assert "256" in refusal(client, TEXT, text_body(["a"] * 200, n=2, max_tokens=1))["message"]


SECRET = "swordfish"
BAD_MESSAGES: dict[str, Any] = {
    "none": [],
    "null": None,
    "a string": SECRET,
    "an object": {"role": "user", "content": SECRET},
    "not objects": [SECRET],
    "no role": [{"content": SECRET}],
    "an unknown role": [{"role": "wizard", "content": SECRET}],
    "a number as role": [{"role": 5, "content": SECRET}],
    "no content": [{"role": "user"}],
    "null content": [{"role": "user", "content": None}],
    "a number as content": [{"role": "user", "content": 5}],
    "an object as content": [{"role": "user", "content": {"text": SECRET}}],
    "a part without type": [{"role": "user", "content": [{"text": SECRET}]}],
    "a part of another type": [{"role": "user", "content": [{"type": "input_audio", "text": SECRET}]}],
    "a null text": [{"role": "user", "content": [{"type": "text", "text": None}]}],
    "an unknown field": [{"role": "user", "content": SECRET, "mood": "good"}],
    "a result without a call": [{"role": "tool", "tool_call_id": "a", "content": SECRET}],
    "a result before its call": [
        {"role": "tool", "tool_call_id": "a", "content": SECRET},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
        },
    ],
    "a result without an id": [{"role": "tool", "content": SECRET}],
    "a call without a function": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}],
    "too many": [{"role": "user", "content": "a"}] * 10_000,
    "an old function call": [{"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": ""}}],
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_messages_are_refused_without_repeating_them(client: httpx.Client, name: str) -> None:
    error = refusal(client, CHAT, chat_body() | {"messages": BAD_MESSAGES[name]})
    assert error["param"].startswith("messages")
    assert SECRET not in json.dumps(error)


@pytest.mark.parametrize(
    "model",
    [
        "gpt-4",
        "../../etc/passwd",
        "/etc/passwd",
        "https://example.org/model.gguf",
        "hf:org/repo",
        "x" * 4096,
        "",
        "a\nb",
    ],
    ids=lambda model: model[:20],
)
def test_an_unknown_model_is_404_whatever_it_looks_like(client: httpx.Client, model: str) -> None:
    error = refusal(client, CHAT, chat_body() | {"model": model}, status=404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert SMOLLM2 in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize("model", [None, 5, [], {}, True])
def test_a_model_is_named_by_a_string(client: httpx.Client, model: Any) -> None:
    assert refusal(client, CHAT, chat_body() | {"model": model})["param"] == "model"


def test_a_barrage_of_bad_requests_leaves_a_neighbours_stream_alone(client: httpx.Client) -> None:
    body = text_body("Once upon a time", max_tokens=40, ignore_eos=True)
    alone = answer(client, TEXT, body)["choices"][0]["text"]
    bad = [chat_body() | {"messages": messages} for messages in BAD_MESSAGES.values()]
    bad += [chat_body(**{name: [{}]}) for name in FIELDS if name != "user"]
    with ThreadPoolExecutor(4) as pool:
        neighbour = pool.submit(chunks, client, TEXT, body)
        statuses = {response.status_code for response in pool.map(lambda one: client.post(CHAT, json=one), bad)}
        assert statuses == {400}
        assert joined(neighbour.result()) == alone
    assert client.get("/health/live").status_code == 200
