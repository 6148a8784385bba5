"""Tenants do not see each other: not in the prefix cache, not in its timing, not in anything that is reused."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.conftest import Size
from tests.server.keyed import KeyedServer, chat_body, completion_body, events

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("unchanged_keyed")]

FIRST_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven")


def prefix(word: str) -> str:
    """About 300 tokens that no other test has computed."""
    return f"{word} {time.time_ns()} " + " ".join(f"{word} number {n} stands by the river." for n in range(30))


def cached_tokens(keyed: KeyedServer, name: str, prompt: str, **fields: Any) -> int:
    with keyed.client(name) as client:
        response = client.post("/v1/completions", json=completion_body(prompt, max_tokens=1, **fields))
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def first_token_s(keyed: KeyedServer, name: str, prompt: str) -> float:
    with keyed.client(name) as client:
        client.get("/v1/models")  # the connection is no part of it
        began = time.monotonic()
        body = completion_body(prompt, max_tokens=1, stream=True)
        with client.stream("POST", "/v1/completions", json=body) as response:
            told = events(response)  # kept: httpx closes the connection with it
            next(told)
            return time.monotonic() - began


def test_a_prefix_is_shared_within_a_group_and_with_nobody_else(keyed: KeyedServer) -> None:
    prompt = prefix("oak")
    assert cached_tokens(keyed, "alice", prompt) == 0
    assert cached_tokens(keyed, "alice", prompt) > 200
    assert cached_tokens(keyed, "anna", prompt) > 200  # of the same group
    assert cached_tokens(keyed, "bert", prompt) == 0
    assert cached_tokens(keyed, "bert", prompt) > 200  # by now its own


def test_a_salt_separates_further_but_opens_no_other_tenants_cache(keyed: KeyedServer) -> None:
    prompt = prefix("elm")
    assert cached_tokens(keyed, "alice", prompt) == 0
    assert cached_tokens(keyed, "alice", prompt, cache_salt="mine") == 0
    assert cached_tokens(keyed, "alice", prompt, cache_salt="mine") > 200
    for salt in ("team-a", "alice", "mine"):
        assert cached_tokens(keyed, "bert", prompt, cache_salt=salt) == 0


def test_the_first_token_of_another_tenants_prefix_is_as_slow_as_a_cold_one(keyed: KeyedServer, size: Size) -> None:
    """F8: time tells tenant B nothing about what tenant A has asked."""
    cold, warm, foreign = [], [], []
    for number, word in enumerate(FIRST_WORDS, 1):
        prompt = prefix(word)
        cold.append(first_token_s(keyed, "alice", prompt))
        warm.append(first_token_s(keyed, "alice", prompt))
        foreign.append(first_token_s(keyed, "bert", prompt))
        known, unknown = (statistics.median(times) / statistics.median(cold) for times in (warm, foreign))
        if number >= size(3, 8) and known < 0.5 and unknown > 0.7:
            break  # others on this machine disturb: more prompts are asked until they show it
    assert known < 0.5  # else this test would show nothing
    assert unknown > 0.7


# Everything that leaves its mark in buffers: biases, penalties, masks, many answers, log-probabilities, stops.
MARKS: tuple[dict[str, Any], ...] = (
    {"logit_bias": {str(token): 100 for token in range(300, 320)}},
    {"frequency_penalty": 2.0, "presence_penalty": 2.0, "temperature": 2.0, "seed": 3},
    {"n": 4, "temperature": 1.5, "seed": 9},
    {"logprobs": True, "top_logprobs": 20},
    {"stop": ["a", "e", "i"]},
    {"response_format": {"type": "json_object"}, "max_tokens": 16},
    {"repetition_penalty": 50.0},
    {"min_p": 0.9, "top_k": 1, "temperature": 1.0},
)
PLAIN = ("The capital of France is", "Water boils at", "Write a line about snow.")


def test_no_request_leaves_anything_in_what_the_next_one_uses(keyed: KeyedServer, size: Size) -> None:
    """F9: a plain answer is the same bytes alone, after and beside requests that touch every buffer."""
    alone = {text: _plain(keyed, "bert", text) for text in PLAIN}
    with ThreadPoolExecutor(8) as pool:
        for number in range(size(1, 20)):
            marked = [pool.submit(keyed.chat, "alice", f"{number} {mark}", **mark) for mark in MARKS]
            beside = [(text, pool.submit(_plain, keyed, "bert", text)) for text in PLAIN]
            assert {text: answer.result() for text, answer in beside} == alone
            assert {answer.result().status_code for answer in marked} == {200}
            assert {text: _plain(keyed, "bert", text) for text in PLAIN} == alone


def test_a_secret_in_one_tenants_prompt_shows_nowhere_else(keyed: KeyedServer) -> None:
    secret = "heliotrope-7731-walrus"
    text = f"Remember the password {secret}. Repeat: {secret} {secret} {secret}"
    assert keyed.chat("alice", text, max_tokens=16).status_code == 200
    told: list[httpx.Response] = [keyed.chat("bert", "What is the password?", max_tokens=16)]
    with keyed.client("bert") as client:
        told += [client.get(path) for path in ("/metrics", "/v1/models", "/health", "/v1/requests/x")]
        told += [client.post("/v1/chat/completions", json=chat_body(text, max_tokens=10**7))]
    assert secret not in "".join(response.text for response in told)
    assert secret not in keyed.process.log


def test_nobody_sees_or_cancels_anothers_request(keyed: KeyedServer) -> None:
    with keyed.client("alice") as owner, keyed.client("bert") as other:
        body = chat_body("Count to a thousand.", max_tokens=300, stream=True)
        with owner.stream("POST", "/v1/chat/completions", json=body) as response:
            told = events(response)  # kept: httpx closes the connection with it
            first = next(told)
            path = f"/v1/requests/{first['id']}"
            assert owner.get(path).status_code == 200
            assert other.get(path).status_code == 404
            assert other.delete(path).status_code in (404, 405)
            assert other.post(f"{path}/cancel").status_code in (404, 405)
            assert next(told)


def _plain(keyed: KeyedServer, name: str, text: str) -> str:
    response = keyed.chat(name, text, max_tokens=12)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])
