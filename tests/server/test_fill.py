"""/v1/fill over a real socket: the diffusion model of the package fills templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.process import ServerProcess

MODEL = "tiny-diffusion"
FILL = "/v1/fill"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}}}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with ServerProcess("--model", MODEL) as server, server.client() as client:
        yield client


def test_a_template_comes_back_filled(http: httpx.Client) -> None:
    slots = {"pet": {"choices": ["dog", "cat"]}, "age": {"regex": "[1-9]"}}
    asked = {"model": MODEL, "template": "A {{pet}} of {{age}} years {{did}}.", "slots": slots, "seed": 1}
    told = http.post(FILL, json=asked).json()
    assert told["object"] == "fill"
    assert re.fullmatch(r"A (dog|cat) of [1-9] years .*\.", told["text"]), told
    assert told["text"] == "A {pet} of {age} years {did}.".format(**told["values"])
    assert http.post(FILL, json=asked).json()["text"] == told["text"]


def test_a_slot_is_named_in_any_language(http: httpx.Client) -> None:
    asked = {"model": MODEL, "template": "Tom was {{größe}}.", "slots": {"größe": {"choices": ["small", "tall"]}}}
    told = http.post(FILL, json=asked).json()
    assert told["text"] == f"Tom was {told['values']['größe']}."


def test_a_schema_comes_back_as_json(http: httpx.Client) -> None:
    told = http.post(FILL, json={"model": MODEL, "json_schema": SCHEMA, "prompt": "Tom was old."}).json()
    assert json.loads(told["text"])["age"] <= 99
    assert told["values"].keys() == {"/age", "/ok"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "template"),
        ({"template": "x"}, "template"),
        ({"template": "{{a}}", "json_schema": SCHEMA}, "template"),
        ({"template": "{{a}}", "slots": {"b": {}}}, "slots"),
        ({"template": "{{a}}", "slots": {"a": {"regex": "x", "choices": ["y"]}}}, "slots.a"),
        ({"template": "{{a}}", "slots": {"a": {"regex": "("}}}, "slots"),
        ({"template": "{{a}}", "slots": {"a": {"max_tokens": 4000}}}, "template"),
        ({"template": "{{a}}" + " and on" * 600}, "template"),
        ({"template": "{{a}}" + "x" * 1_000_000}, "template"),
        ({"template": "{{a}}", "prompt": "on " * 600}, "prompt"),
        ({"template": "{{a}}", "prompt": "x" * 1_000_000}, "prompt"),
        ({"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 10**9}}, "json_schema"),
        ({"template": "{{a}}", "diffusion": {"pinned": {"0": 1}}}, "diffusion.pinned"),
        ({"json_schema": {"type": "object", "properties": {"a": {"type": "strin"}}}}, "json_schema"),
        ({"template": "{{a}}", "stream": True}, "stream"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_filled_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post(FILL, json={"model": MODEL, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


BETWEEN = {"model": MODEL, "prompt": "One day, a little ", "suffix": " and they played in the park.", "max_tokens": 8}


def test_a_suffix_is_written_towards(http: httpx.Client) -> None:
    told = http.post("/v1/completions", json=BETWEEN).json()
    (choice,) = told["choices"]
    assert choice["text"]
    assert not choice["text"].startswith(" ")  # the prompt ends with the space
    assert not choice["text"].endswith(" ")  # and the suffix begins with one
    assert "park" not in choice["text"]
    assert choice["finish_reason"] in ("stop", "length")
    assert told["usage"]["completion_tokens"] <= 8 < told["usage"]["prompt_tokens"]
    ids = http.post("/tokenize", json={"model": MODEL, "prompt": "One day, a little"}).json()["tokens"]
    by_ids = http.post("/v1/completions", json=BETWEEN | {"prompt": ids}).json()["choices"][0]["text"]
    assert by_ids.removeprefix(" ") == choice["text"]
    lines = http.post("/v1/completions", json=BETWEEN | {"stream": True}).text.splitlines()
    streamed = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [one["choices"] for one in streamed] == [[choice]]
    many = BETWEEN | {"prompt": [BETWEEN["prompt"], "Tom had a "], "n": 2, "temperature": 1, "seed": 4}
    texts = [one["text"] for one in http.post("/v1/completions", json=many).json()["choices"]]
    assert len(texts) == 4
    assert texts == [one["text"] for one in http.post("/v1/completions", json=many).json()["choices"]]
    assert (
        texts[2]
        == http.post("/v1/completions", json=many | {"prompt": "Tom had a ", "n": 1}).json()["choices"][0]["text"]
    )


def test_texts_are_pinned_over_http(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "Tom and his dog", "max_tokens": 24, "diffusion": {"pinned": {"8": " The end."}}}
    told = http.post("/v1/completions", json=body)
    assert " The end." in told.json()["choices"][0]["text"], told.text
    for pinned in ({"8": ""}, {"8": " The end.", "9": 5}, {"23": " The end of it."}):
        refused = http.post("/v1/completions", json=body | {"diffusion": {"pinned": pinned}})
        assert refused.status_code == 400, refused.text
        assert "pinned" in refused.json()["error"]["message"]


def test_ollamas_suffix_is_the_same_middle(http: httpx.Client) -> None:
    wanted = http.post("/v1/completions", json=BETWEEN | {"seed": 3, "temperature": 1}).json()
    options = {"num_predict": 8, "seed": 3, "temperature": 1}
    asked = {"model": MODEL, "prompt": BETWEEN["prompt"], "suffix": BETWEEN["suffix"], "options": options}
    whole = http.post("/api/generate", json=asked | {"stream": False}).json()
    assert whole["response"] == wanted["choices"][0]["text"]
    assert whole["eval_count"] == wanted["usage"]["completion_tokens"]
    lines = [json.loads(line) for line in http.post("/api/generate", json=asked).text.splitlines()]
    assert "".join(line["response"] for line in lines) == whole["response"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "insert" in http.post("/api/show", json={"model": MODEL}).json()["capabilities"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"suffix": " and on" * 600}, "suffix"),
        ({"prompt": "on " * 600}, "prompt"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"diffusion": {"pinned": {"0": 1}}}, "diffusion.pinned"),
        ({"diffusion": {"events": True}, "stream": True}, "diffusion.events"),
    ],
)
def test_a_suffix_that_cannot_be_reached_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    told = http.post("/v1/completions", json=BETWEEN | fields)
    assert (told.status_code, told.json()["error"]["param"]) == (400, param), told.text
