"""Structured output over the wire: what was asked for is what comes back, and hostile schemas end in a 400."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

from tests.server.asking import CHAT, TEXT, answer, chat_body, chunks, joined, refusal, text_body
from tests.server.process import SMOLLM2, ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("unchanged")]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}},
    "$ref": "#/$defs/node",
}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | more}


def is_person(text: str) -> bool:
    return jsonschema_rs.validator_for(PERSON).is_valid(json.loads(text))


@pytest.mark.parametrize("strict", [True, False])
def test_a_json_schema_is_followed(client: httpx.Client, strict: bool) -> None:
    body = chat_body("Invent a person.", max_tokens=80, response_format=schema_format(PERSON, strict=strict))
    choice = answer(client, CHAT, body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert is_person(choice["message"]["content"])


def test_a_stream_carries_the_same_text(client: httpx.Client) -> None:
    body = chat_body("Invent a person.", max_tokens=80, response_format=schema_format(PERSON), temperature=1, seed=4)
    whole = answer(client, CHAT, body)["choices"][0]["message"]["content"]
    read = chunks(client, CHAT, body)
    assert joined(read) == whole
    assert is_person(whole)
    assert read[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_json_object_begins_as_one_and_says_when_it_was_cut(client: httpx.Client) -> None:
    body = chat_body("Describe a house in JSON.", max_tokens=12, response_format={"type": "json_object"})
    choice = answer(client, CHAT, body)["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["finish_reason"] == "length"


def test_every_choice_follows_the_schema(client: httpx.Client) -> None:
    body = chat_body(
        "Invent a person.", max_tokens=80, response_format=schema_format(PERSON), n=3, temperature=1, seed=2
    )
    choices = answer(client, CHAT, body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert all(is_person(choice["message"]["content"]) for choice in choices if choice["finish_reason"] == "stop")
    assert any(choice["finish_reason"] == "stop" for choice in choices)


def test_text_as_response_format_changes_nothing(client: httpx.Client) -> None:
    plain = answer(client, CHAT, chat_body())["choices"]
    assert answer(client, CHAT, chat_body(response_format={"type": "text"}))["choices"] == plain


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_patterns_schemas_and_grammars_work_on_both_routes(client: httpx.Client, path: str) -> None:
    def text_of(**fields: Any) -> str:
        body = chat_body(max_tokens=60, **fields) if path == CHAT else text_body(max_tokens=60, **fields)
        choice = answer(client, path, body)["choices"][0]
        assert choice["finish_reason"] == "stop"
        text: str = choice["message"]["content"] if path == CHAT else choice["text"]
        return text

    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text_of(guided_regex="[0-9]{3}-[a-f]{2}"))
    assert is_person(text_of(guided_json=PERSON))
    assert is_person(text_of(guided_json=json.dumps(PERSON)))
    assert text_of(guided_grammar='start: "yes" | "no"') in ("yes", "no")


def test_a_constraint_goes_with_logprobs_bias_penalties_and_stop(client: httpx.Client) -> None:
    body = chat_body(
        "Invent a person.",
        max_tokens=80,
        response_format=schema_format(PERSON),
        temperature=1.3,
        seed=7,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"28": 50},
        presence_penalty=1.5,
        frequency_penalty=1.0,
    )
    choice = answer(client, CHAT, body)["choices"][0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).startswith("{")
    if choice["finish_reason"] == "stop":
        assert is_person(choice["message"]["content"])
    stopped = answer(client, CHAT, chat_body(guided_regex="abcdef", stop=["cd"], max_tokens=20))["choices"][0]
    assert stopped["message"]["content"] == "ab"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": schema_format({"type": "string", "minLength": 5, "maxLength": 3})}, "minLength"),
        ({"response_format": schema_format({"$ref": "http://127.0.0.1:9/x.json"})}, "not fetch"),
        ({"response_format": schema_format({"type": "array", "uniqueItems": True})}, "uniqueItems"),
        ({"response_format": schema_format({"type": "integer", "multipleOf": 10_000_019})}, "too complex"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_regex": "(" * 5000}, "unclosed|nest"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_grammar": "start: nobody"}, "nobody"),
        ({"guided_grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(9000))])}, ""),
        ({"guided_json": "{"}, "JSON"),
        ({"guided_json": {"enum": [f"value {i}" for i in range(40_000)]}}, "bytes"),
        ({"guided_regex": "a", "guided_json": {}}, "guided"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_enforced_is_a_400_that_says_why(
    client: httpx.Client, server: ServerProcess, fields: dict[str, Any], said: str
) -> None:
    error = refusal(client, CHAT, chat_body(**fields))
    assert error["type"] == "invalid_request_error"
    assert re.search(said, error["message"]), error["message"]
    assert not re.search(r"/(usr|home|work|tmp|etc)/|Traceback|\.py\b", error["message"])
    assert server.process.poll() is None


def test_a_refused_schema_changes_nobody_elses_stream(client: httpx.Client, server: ServerProcess) -> None:
    body = chat_body("Tell me about the sea.", max_tokens=30)
    alone = joined(chunks(client, CHAT, body))
    with client.stream("POST", CHAT, json=body | {"stream": True}) as stream:
        lines = stream.iter_lines()
        first = [next(lines)]
        with server.client() as other:
            refusal(other, CHAT, chat_body(guided_regex="(?=a)b"))
            answer(other, CHAT, chat_body(response_format=schema_format(TREE), max_tokens=20))
        rest = [*first, *lines]
    read = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: {")]
    assert joined(read) == alone


def test_the_official_client_parses_what_it_asked_for(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        completion = official.chat.completions.create(
            model=SMOLLM2,
            messages=[{"role": "user", "content": "Invent a person."}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "strict": True, "schema": PERSON},
            },
            max_completion_tokens=80,
            temperature=0,
        )
    assert is_person(completion.choices[0].message.content or "")
