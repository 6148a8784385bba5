"""Wrong values at every field of every route of a running server: no 5xx, no internal word, and the field is named.

Also what is found only with a model at hand: the item of a list that is too long, tools that are, schemas without end.
"""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from tests.conftest import Size
from tests.server.asking import CHAT, TEXT, chat_body, refusal, text_body
from tests.server.process import MINILM, SMOLLM2
from tests.unit.server.test_body_bounds import cases, schemas_of_routes
from tests.unit.server.test_validation_words import BASES, INTERNAL, VALUES

pytestmark = pytest.mark.model

ROUTES = {path: schema for path, schema in schemas_of_routes() if path in BASES}
MAX_BODY = 100_000  # characters: how large ones are read is for other tests
LONG = "word " * 4000


def is_small(value: Any) -> bool:
    return len(str(value)) < MAX_BODY


@pytest.mark.parametrize("path", BASES)
def test_wrong_values_are_refused_by_name(client: httpx.Client, path: str, size: Size) -> None:
    tried = [
        (name, BASES[path] | place(value))
        for name, place in cases(ROUTES[path]).items()
        for value in VALUES
        if name and is_small(value)
    ]
    at = path.replace("{name}", "unlucky")
    num_refused = 0
    for name, body in random.Random(7).sample(tried, min(len(tried), size(60, 5000))):
        reply = client.post(at, json=body)
        assert reply.status_code < 500, (name, body, reply.text)
        if 400 <= reply.status_code < 499 and reply.status_code != 404:
            num_refused += 1
            check_refusal(at, body, reply)
    assert num_refused


def check_refusal(path: str, body: dict[str, Any], reply: httpx.Response) -> None:
    error = reply.json()["error"]
    message = error["message"]
    named = error.get("param") or message.split()[0]
    assert named.partition(".")[0].strip("':") in {*body, "the", "prompt"}, (path, body, error)
    assert error.get("param") or path.startswith("/v1/messages"), (path, body, error)
    assert not INTERNAL.search("".join(message.split("'")[::2])), (path, body, error)
    assert len(message) <= 900


ITEMS = [
    (TEXT, text_body(["fine", "fine", LONG]), "prompt.2"),
    (TEXT, text_body(["fine", "word " * 2500]), "prompt.1"),
    (TEXT, text_body([[1, 2], [1, 49_152]]), "prompt.1"),
    (TEXT, text_body([LONG]), "prompt"),
    ("/v1/embeddings", {"model": MINILM, "input": ["fine", "fine", "fine", LONG]}, "input.3"),
    ("/v1/embeddings", {"model": MINILM, "input": ["fine", "word " * 600]}, "input.1"),
    ("/v1/embeddings", {"model": MINILM, "input": [[101], [10**6]]}, "input.1"),
    ("/v1/embeddings", {"model": MINILM, "input": LONG}, "input"),
    ("/rerank", {"model": SMOLLM2, "query": "q", "documents": [*["fine"] * 9, LONG]}, "documents.9"),
    ("/rerank", {"model": SMOLLM2, "query": "q", "documents": ["fine", "word " * 2500]}, "documents.1"),
]


@pytest.mark.parametrize(("path", "body", "param"), ITEMS, ids=[param for *_, param in ITEMS])
def test_of_several_texts_the_one_at_fault_is_named(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(client, path, body)["param"] == param


def a_tool(parameters: dict[str, Any], description: str = "") -> dict[str, Any]:
    function = {"name": "f", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@pytest.mark.parametrize("number", [2500, 20_000], ids=["a little", "far"])
def test_a_prompt_that_is_too_long_because_of_its_tools_says_so(client: httpx.Client, number: int) -> None:
    tools = [a_tool({"type": "object", "properties": {}}, "word " * number)]
    error = refusal(client, CHAT, chat_body("Hi", tools=tools))
    assert (error["param"], error["code"]) == ("tools", "context_length_exceeded")
    assert "tools have about" in error["message"]
    assert refusal(client, CHAT, chat_body("word " * number, tools=[a_tool({})]))["param"] == "messages"
    told = client.post("/v1/messages", json={**BASES["/v1/messages"], "tools": [claudes(tools[0])]}).json()
    assert told["error"]["message"].startswith("prompt is too long: tools have about")


def claudes(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {"name": "f", "description": function["description"], "input_schema": function["parameters"]}


ENDLESS = {
    "itself": {"$ref": "#"},
    "a required property": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "a list": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}}},
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS.keys())
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_without_end_is_refused_before_the_answer(
    client: httpx.Client, schema: dict[str, Any], choice: str
) -> None:
    for stream in (False, True):
        body = chat_body("Hi", tools=[a_tool({}), a_tool(schema)], tool_choice=choice, stream=stream)
        body["tools"][0]["function"]["name"] = "g"
        assert refusal(client, CHAT, body)["param"] == "tools.1.function.parameters"
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert refusal(client, CHAT, chat_body("Hi", response_format=wanted))["param"] == "response_format"
    assert refusal(client, CHAT, chat_body("Hi", guided_json=schema))["param"] == "guided_json"


def test_error_texts_are_short_whatever_was_sent(client: httpx.Client) -> None:
    name = "n" * 900_000
    for path, body in [
        (CHAT, chat_body(model=name)),
        (CHAT, chat_body() | {name: 1}),
        (CHAT, chat_body(chat_template_kwargs={name: {name[:10]: 1}}, truncate=name[:100_000])),
        (CHAT, chat_body(logit_bias={name: 1})),
        (CHAT, chat_body(tools=[a_tool({"type": name})])),
        (CHAT, chat_body(response_format={"type": name})),
        (CHAT, chat_body(guided_json={"type": name[:200_000]})),
        (CHAT, chat_body(guided_regex=f"({name[:200_000]}")),
        ("/v1/embeddings", {"model": name, "input": "x"}),
        ("/v1/collections", {"name": name}),
        ("/v1/collections/c/search", {"query": "x", "filter": {name: {name: 1}}}),
        ("/v1/responses", {"model": SMOLLM2, "input": "x", "previous_response_id": name[:256]}),
    ]:
        reply = client.post(path, json=body)
        assert 400 <= reply.status_code < 500, reply.text[:300]
        assert len(reply.content) < 1500, (path, list(body), len(reply.content))
