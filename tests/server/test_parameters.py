"""Every field of a request with every kind of bad value: 400 that names the field, or an answer; never anything else.

Group B of the hardening list: generated from a table of fields, sent over a real socket.
"""

from __future__ import annotations

import json
import math
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, answer, chat_body, chunks, joined, refusal, text_body
from tests.server.keyed import KeyedServer
from tests.server.process import SMOLLM2

pytestmark = pytest.mark.model

VOCABULARY = 49_152
INT31 = 2**31 - 1
CONTEXT, PROMPT = 2048, 34  # tokens: of the shared server, and of the shortest chat


@dataclass(frozen=True, slots=True)
class Field:
    """What a field accepts: numbers between low and high; None always means leaving it out."""

    kind: type
    low: float = -math.inf
    high: float = math.inf
    path: str = CHAT
    needs: tuple[tuple[str, Any], ...] = ()  # fields without which it means nothing
    accepted: tuple[Any, ...] = ()  # beside numbers

    def accepts(self, value: Any) -> bool:
        if value is None or any(value == one and type(value) is type(one) for one in self.accepted):
            return True
        if self.kind is str:
            return False
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if isinstance(value, float) and self.kind is int:
            return False
        return isinstance(value, int | float) and math.isfinite(value) and self.low <= value <= self.high


FIELDS = {
    "n": Field(int, 1, 16),
    "max_tokens": Field(int, 1, CONTEXT - PROMPT, needs=(("stop", ["a", "e"]),)),
    "max_completion_tokens": Field(int, 1, CONTEXT - PROMPT, needs=(("max_tokens", None), ("stop", ["a", "e"]))),
    "temperature": Field(float, 0, 100),
    "top_p": Field(float, 0, 1),
    "min_p": Field(float, 0, 1),
    "typical_p": Field(float, 0, 1),
    "top_k": Field(int, 0, INT31),
    "presence_penalty": Field(float, -2, 2),
    "frequency_penalty": Field(float, -2, 2),
    "repetition_penalty": Field(float, 0.01, 100),
    "penalty_window": Field(int, 1, INT31),
    "dry_multiplier": Field(float, 0, 100),
    "dry_base": Field(float, 1, 100),
    "dry_allowed_length": Field(int, 1, 1000),
    "dry_sequence_breakers": Field(str, accepted=([],)),
    "xtc_probability": Field(float, 0, 1),
    "xtc_threshold": Field(float, 0, 1),
    "min_tokens": Field(int, 0, 2),
    "seed": Field(int, -(2**63), 2**63 - 1),
    "top_logprobs": Field(int, 0, 20, needs=(("logprobs", True),)),
    "prompt_logprobs": Field(int, 0, 20),
    "priority": Field(int, -100, 100),
    "logprobs": Field(bool),
    "stream": Field(bool),
    "ignore_eos": Field(bool),
    "parallel_tool_calls": Field(bool),
    "stop": Field(str, accepted=("5", [])),
    "stop_token_ids": Field(str, accepted=([],)),
    "logit_bias": Field(str, accepted=({},)),
    "stream_options": Field(str, needs=(("stream", True),), accepted=({},)),
    "tools": Field(str, accepted=([],)),
    "tool_choice": Field(str),
    "response_format": Field(str),
    "guided_json": Field(str, needs=(("max_tokens", 3),), accepted=({},)),
    "guided_regex": Field(str, accepted=("5",)),
    "guided_grammar": Field(str),
    "truncate": Field(str),
    "cache_salt": Field(str, accepted=("5",)),
    "chat_template_kwargs": Field(str, accepted=({},)),
    "modalities": Field(str, accepted=([],)),
    "store": Field(str, accepted=(False,)),
    "user": Field(str, accepted=(-1, 0, 2**31, 2**63, 2**64, "5", True, [], {}, 1.5, 10**30)),
    "echo": Field(bool, path=TEXT),
    "best_of": Field(int, 1, 1, path=TEXT),
    "suffix": Field(str, path=TEXT),
}
VALUES: tuple[Any, ...] = (
    *(-1, 0, 2**31, 2**63, 2**64, math.nan, math.inf, -math.inf, "5", True, None, [], {}, 1.5, 10**30),
)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_takes_what_it_can_use_and_refuses_the_rest_by_name(client: httpx.Client, name: str) -> None:
    one = FIELDS[name]
    bounds = [bound + step for bound, step in ((one.low, -1), (one.high, 1)) if math.isfinite(bound)]
    for value in (*VALUES, *(type(one.low)(bound) for bound in bounds), *(b for b in (one.low,) if math.isfinite(b))):
        base = chat_body(max_tokens=2) if one.path == CHAT else text_body(max_tokens=2)
        content = json.dumps(base | dict(one.needs) | {name: value})
        response = client.post(one.path, content=content, headers={"content-type": "application/json"})
        is_number = isinstance(value, int | float)
        if is_number and not math.isfinite(value):
            assert response.status_code == 400, (name, value)  # no JSON at all
            continue
        if one.accepts(value):
            assert response.status_code == 200, (name, value, response.text)
            continue
        assert response.status_code == 400, (name, value, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert (error["param"] or "").startswith(name), (name, value, error)
        assert name in error["message"]


def test_integers_may_not_be_written_as_fractions(client: httpx.Client) -> None:
    content = json.dumps(chat_body()).replace('"max_tokens": 6', '"max_tokens": 6.0')
    assert "6.0" in content
    response = client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400


def test_more_tokens_than_the_context_are_refused_with_both_numbers(client: httpx.Client) -> None:
    error = refusal(client, TEXT, text_body("one two three", max_tokens=2046))
    assert error["param"] == "max_tokens"
    assert error["code"] == "context_length_exceeded"
    assert "2,046" in error["message"]
    assert "2,048" in error["message"]
    assert answer(client, TEXT, text_body("one two three", max_tokens=1, stop_token_ids=[]))


@pytest.mark.parametrize(
    "key", ["-1", "1.5", "abc", "01", " 1", "1 ", "+1", "１", "1_0", "", str(VOCABULARY), "2147483648"]
)
def test_logit_bias_takes_plain_decimal_ids_of_the_vocabulary(client: httpx.Client, key: str) -> None:
    error = refusal(client, CHAT, chat_body(logit_bias={key: 1.0}))
    assert "logit_bias" in error["message"]


@pytest.mark.parametrize("value", [101, -100.5, "5", True, None, [], 1e300])
def test_logit_bias_takes_numbers_up_to_100(client: httpx.Client, value: Any) -> None:
    assert refusal(client, CHAT, chat_body(logit_bias={"7": value}))["param"].startswith("logit_bias")


def test_logit_bias_takes_300_entries(client: httpx.Client) -> None:
    answer(client, CHAT, chat_body(logit_bias={str(token): -1 for token in range(300)}))
    assert (
        refusal(client, CHAT, chat_body(logit_bias={str(token): -1 for token in range(301)}))["param"] == "logit_bias"
    )


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], ["x"] * 17, "x" * 257, "é" * 129, [1], [None], [["a"]]])
def test_bad_stop_strings_are_refused(client: httpx.Client, stop: Any) -> None:
    assert refusal(client, CHAT, chat_body(stop=stop))["param"].startswith("stop")


@pytest.mark.parametrize("ids", [[-1], [VOCABULARY], [2**31], ["1"], [1.5], [True], [None], [1] * 257])
def test_bad_stop_token_ids_are_refused(client: httpx.Client, ids: Any) -> None:
    assert "stop_token_ids" in refusal(client, CHAT, chat_body(stop_token_ids=ids))["message"]


@pytest.mark.parametrize("n", [16, 17, 128, 129])
def test_n_is_bounded_by_the_server(client: httpx.Client, n: int) -> None:
    body = chat_body(n=n, max_tokens=1)
    if n <= 16:
        assert len(answer(client, CHAT, body)["choices"]) == 16
    else:
        assert refusal(client, CHAT, body)["param"] == "n"


def test_all_answers_count_against_the_tier_before_they_begin(keyed: KeyedServer) -> None:
    with keyed.client("few_tokens") as http:
        response = http.post(CHAT, json=chat_body(n=8, max_tokens=16))
        assert response.status_code == 400
        assert "120" in response.json()["error"]["message"]


def test_logprobs_are_bounded_in_sum(client: httpx.Client) -> None:
    prompts = ["word " * 1000] * 4
    error = refusal(client, TEXT, text_body(prompts, prompt_logprobs=20, max_tokens=1))
    assert error["param"] == "prompt_logprobs"
    refusal(client, TEXT, text_body(["a"] * 8, n=16, logprobs=20, max_tokens=1900))


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
    assert refusal(client, TEXT, text_body(["a"] * 2048, max_tokens=1))["param"] == "prompt"
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reasoning_effort", "high"),
        ("functions", []),
        ("function_call", "auto"),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("verbosity", "low"),
        ("store", True),
        ("chat_template", "{{ messages }}"),
        ("suffix", "x"),
    ],
)
def test_what_would_change_the_answer_and_cannot_be_honoured_is_refused_by_name(
    client: httpx.Client, field: str, value: Any
) -> None:
    error = refusal(client, CHAT, chat_body(**{field: value}))
    assert error["param"].startswith(field)
    assert field in error["message"]


@pytest.mark.parametrize("field", ["temprature", "max_new_tokens", "x" * 3000, "__class__", "a.b", "é"])
def test_unknown_fields_are_refused_by_name(client: httpx.Client, field: str) -> None:
    error = refusal(client, CHAT, chat_body(**{field: 1}))
    assert error["code"] == "unknown_field"
    assert len(error["message"]) < 200


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "_x", "a b", "tokenize"])
def test_template_arguments_cannot_replace_what_the_server_sets(client: httpx.Client, name: str) -> None:
    refusal(client, CHAT, chat_body(chat_template_kwargs={name: "x"}))


def test_all_samplers_work_together(client: httpx.Client) -> None:
    """B6: combinations drawn at random; each is answered, twice the same, and follows its constraint."""
    draw = random.Random(6)
    options: dict[str, list[Any]] = {
        "temperature": [0, 0.7, 2.0, 100],
        "top_p": [0.0, 0.3, 1.0],
        "top_k": [0, 1, 40],
        "min_p": [0.0, 0.2, 1.0],
        "typical_p": [0.0, 0.5, 1.0],
        "repetition_penalty": [0.01, 1.3, 100],
        "presence_penalty": [-2, 2],
        "frequency_penalty": [-2, 2],
        "penalty_window": [1, 64],
        "dry_multiplier": [0.8, 100],
        "dry_allowed_length": [1, 3],
        "xtc_probability": [0.5, 1.0],
        "xtc_threshold": [0.0, 0.1, 1.0],
        "logit_bias": [{"7": 100}, {str(token): -100 for token in range(300)}],
        "n": [1, 3],
        "min_tokens": [0, 5],
        "logprobs": [True, False],
        "prompt_logprobs": [0, 2],
        "guided_regex": ["[a-z]{1,30}", None],
        "stop": ["e", ["\n", "a"]],
    }

    def ask(number: int) -> None:
        names = draw_names[number]
        body = chat_body(max_tokens=6, seed=number, **names)
        first, again = (answer(client, CHAT, body)["choices"] for _ in range(2))
        assert first == again, names
        if names.get("guided_regex") and not names.get("stop"):
            for choice in first:
                assert re.fullmatch("[a-z]{0,30}", choice["message"]["content"]), names

    draw_names = [
        {name: draw.choice(values) for name, values in options.items() if draw.random() < 0.5} for _ in range(14)
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(len(draw_names))))


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
