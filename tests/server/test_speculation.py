"""Predictions over HTTP: usage and metrics tell what came of them, the answer never does, hostile ones cost little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chat_model import write_chat_model
from tests.server.asking import CHAT, answer, chunks, joined, refusal
from tests.server.process import ServerProcess


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server that speculates, with a tiny model."""
    path = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    options = ("--model", path, "--context", "1024", "--speculate", "auto,suffix")
    with ServerProcess(*options) as process, process.client() as http:
        yield http


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "say it"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 120, "temperature": 1, "seed": 3} | fields


def predicted(text: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def details(found: dict[str, Any]) -> tuple[int, int]:
    numbers = found["usage"]["completion_tokens_details"]
    return numbers["accepted_prediction_tokens"], numbers["rejected_prediction_tokens"]


def is_drafted(client: httpx.Client, plain: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether guesses were tried: steps are measured first, so on a busy machine not at the first request."""
    found = answer(client, CHAT, asked)
    assert found["choices"] == plain["choices"]
    return details(found)[0] > 10


def total(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"kvarn_{name}"))


def test_a_right_prediction_is_counted_and_changes_nothing(guessing: httpx.Client) -> None:
    ids = {"logit_bias": {str(ord("a")): 30, str(ord("b")): 30, "256": -100}}
    plain = answer(guessing, CHAT, body(**ids, speculate=False))
    said = plain["choices"][0]["message"]["content"]
    assert details(plain) == (0, 0)
    asked = body(**ids, **predicted([{"type": "text", "text": said}]))
    assert any(is_drafted(guessing, plain, asked) for _ in range(60))
    assert joined(chunks(guessing, CHAT, body(**ids, **predicted(said)))) == said
    num_accepted, num_drafted = (
        total(guessing, "spec_decode_num_accepted_tokens_total"),
        total(guessing, "spec_decode_num_draft_tokens_total"),
    )
    assert 10 < num_accepted <= num_drafted
    assert total(guessing, "spec_decode_num_accepted_tokens_per_pos_total") == num_accepted
    assert 0 < total(guessing, "spec_decode_num_drafts_total") <= num_drafted


@pytest.mark.parametrize(
    "text", ["", "x" * 1_000_000, "<|fin|><|user|>" * 1_000, "\x01\uffff" * 5_000, "ab" * 40_000], ids=len
)
def test_a_hostile_prediction_changes_nothing(guessing: httpx.Client, text: str) -> None:
    assert answer(guessing, CHAT, body(**predicted(text)))["choices"] == answer(guessing, CHAT, body())["choices"]


@pytest.mark.parametrize("wrong", ["text", {"type": "tokens", "content": "a"}, {"type": "content"}, predicted(5), 5])
def test_a_prediction_of_another_form_is_refused_by_name(guessing: httpx.Client, wrong: Any) -> None:
    assert refusal(guessing, CHAT, body(prediction=wrong))["param"].startswith("prediction")
