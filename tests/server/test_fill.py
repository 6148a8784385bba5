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
