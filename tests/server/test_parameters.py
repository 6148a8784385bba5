"""Every field of a request with every kind of bad value: 400 that names the field, or an answer; never anything else.

Group B of the hardening list: generated from a table of fields, sent over a real socket.
"""

from __future__ import annotations

import json
import math
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, answer, chat_body, refusal, text_body
from tests.server.field_table import FIELDS, VALUES
from tests.server.keyed import KeyedServer

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("unchanged")]
VOCABULARY = 49_152


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
    ("field", "value"),
    [
        ("functions", []),
        ("function_call", "auto"),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
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
