"""/v1/completions: texts and token ids, batches, echo, logprobs in the older shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.asking import TEXT, answer, chunks, joined, refusal, text_body
from tests.server.process import SMOLLM2, ServerProcess, model_path

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def narrow() -> Iterator[httpx.Client]:
    """A server with a context of 128 tokens."""
    with ServerProcess("--model", model_path(SMOLLM2), "--context", "128") as process, process.client() as http:
        yield http


def tokens_of(client: httpx.Client, text: str) -> list[int]:
    ids: list[int] = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def test_an_answer_has_the_shape_official_clients_read(client: httpx.Client) -> None:
    response = client.post(TEXT, json=text_body())
    got = response.json()
    assert got["object"] == "text_completion"
    assert got["id"] == f"cmpl-{response.headers['x-request-id']}"
    (choice,) = got["choices"]
    assert choice["index"] == 0
    assert choice["text"]
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 6


def test_sixteen_tokens_are_the_default(client: httpx.Client) -> None:
    body = text_body(ignore_eos=True)
    del body["max_tokens"]
    assert answer(client, TEXT, body)["usage"]["completion_tokens"] == 16


def test_token_ids_read_as_the_text_they_stand_for(client: httpx.Client) -> None:
    ids = tokens_of(client, "The sky is")
    assert answer(client, TEXT, text_body(ids))["choices"] == answer(client, TEXT, text_body())["choices"]
    assert answer(client, TEXT, text_body(ids, echo=True, max_tokens=0))["choices"][0]["text"] == "The sky is"


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "ids"])
def test_a_batch_of_prompts_gives_each_the_answer_it_has_alone(client: httpx.Client, as_ids: bool) -> None:
    texts = ["The sky is", "Water is", "Once upon a time"]
    prompts: list[Any] = [tokens_of(client, text) for text in texts] if as_ids else texts
    body = text_body(prompts, n=2, temperature=0.8, seed=11)
    batch = answer(client, TEXT, body)
    assert [choice["index"] for choice in batch["choices"]] == list(range(6))
    said = [choice["text"] for choice in batch["choices"]]
    alone = [answer(client, TEXT, text_body(prompt, n=2, temperature=0.8, seed=11)) for prompt in prompts]
    assert said == [choice["text"] for one in alone for choice in one["choices"]]
    assert batch["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    read = chunks(client, TEXT, body)
    assert [joined(read, index) for index in range(6)] == said


def test_echo_puts_the_prompt_before_the_answer(client: httpx.Client) -> None:
    plain = answer(client, TEXT, text_body())["choices"][0]["text"]
    assert answer(client, TEXT, text_body(echo=True))["choices"][0]["text"] == "The sky is" + plain
    assert joined(chunks(client, TEXT, text_body(echo=True))) == "The sky is" + plain


def test_no_tokens_at_all_are_for_echo_only(client: httpx.Client) -> None:
    got = answer(client, TEXT, text_body(echo=True, max_tokens=0))
    assert got["choices"][0]["text"] == "The sky is"
    assert got["usage"]["completion_tokens"] == 0
    assert refusal(client, TEXT, text_body(max_tokens=0))["param"] == "max_tokens"


def test_logprobs_are_lists_side_by_side(client: httpx.Client) -> None:
    (choice,) = answer(client, TEXT, text_body(logprobs=2))["choices"]
    lists = choice["logprobs"]
    assert {len(lists[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {6}
    assert "".join(lists["tokens"]) == choice["text"]
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    for token, logprob, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert 2 <= len(top) <= 3
        assert top[token] == logprob == max(top.values())  # greedy


def test_echoed_logprobs_score_the_prompt_as_evaluations_need_it(client: httpx.Client) -> None:
    prompt = "The sky is blue and the grass is green."
    (choice,) = answer(client, TEXT, text_body(prompt, echo=True, max_tokens=0, logprobs=1))["choices"]
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"] == prompt
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert all(score < 0 for score in lists["token_logprobs"][1:])
    longer = answer(client, TEXT, text_body(prompt, echo=True, max_tokens=3, logprobs=1))["choices"][0]["logprobs"]
    assert longer["token_logprobs"][: len(lists["tokens"])] == lists["token_logprobs"]
    assert len(longer["tokens"]) == len(lists["tokens"]) + 3


def test_characters_of_several_tokens_keep_offsets_right(client: httpx.Client) -> None:
    prompt = "日本 🎉 naïve"
    (choice,) = answer(client, TEXT, text_body(prompt, echo=True, max_tokens=2, logprobs=0))["choices"]
    lists = choice["logprobs"]
    assert any(token.startswith("bytes:\\x") for token in lists["tokens"])
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert lists["text_offset"][-1] <= len(choice["text"])
    whole = b"".join(
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        if token.startswith("bytes:\\x")
        else token.encode()
        for token in lists["tokens"]
    )
    assert whole.decode().startswith(prompt)


def test_streamed_logprobs_are_those_of_the_whole_answer(client: httpx.Client) -> None:
    (choice,) = answer(client, TEXT, text_body(logprobs=1))["choices"]
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks(client, TEXT, text_body(logprobs=1)):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            lists[name] += values
    assert lists == choice["logprobs"]


def test_logprobs_of_a_prompt_do_not_come_in_streams(client: httpx.Client) -> None:
    refusal(client, TEXT, text_body(stream=True, echo=True, logprobs=1))
    refusal(client, TEXT, text_body(stream=True, prompt_logprobs=1))


def test_truncate_keeps_the_end_of_a_prompt_that_is_too_long(narrow: httpx.Client) -> None:
    body = text_body("word " * 210, max_tokens=150, stop="e")
    error = refusal(narrow, TEXT, body)
    assert error["code"] == "context_length_exceeded"
    assert "127" in error["message"]
    error = refusal(narrow, TEXT, body | {"truncate": "left"})
    assert error["code"] == "context_length_exceeded"  # at most half of the context is kept free for the answer
    got = answer(narrow, TEXT, body | {"truncate": "left", "max_tokens": 60})
    assert got["usage"]["prompt_tokens"] == 68


def test_a_text_that_cannot_fit_is_refused_before_it_is_cut_into_tokens(narrow: httpx.Client) -> None:
    error = refusal(narrow, TEXT, text_body("x" * 1_000_000))
    assert error["code"] == "context_length_exceeded"
    assert "the context allows" in error["message"]


@pytest.mark.parametrize("field", ["suffix", "best_of", "tools", "response_format"])
def test_fields_of_other_apis_are_refused_by_name(client: httpx.Client, field: str) -> None:
    values = {"suffix": "end", "best_of": 3, "tools": [], "response_format": {"type": "text"}}
    error = refusal(client, TEXT, text_body(**{field: values[field]}))
    assert error["param"] == field
    assert field in error["message"]
    answer(client, TEXT, text_body(**{field: None}))
