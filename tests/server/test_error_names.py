"""An error names the field that the client sent, in the words of the protocol it was sent in."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from kvarn.server.api.anthropic.schema import MessagesBody
from tests.server.asking import CHAT, TEXT, chat_body, refusal, text_body
from tests.server.process import SMOLLM2, ServerProcess

pytestmark = pytest.mark.model
VOCABULARY = 49_152
IMPOSSIBLE = {"type": "string", "minLength": 5, "maxLength": 3}
LIST = {"type": "array"}
GOOD = {"type": "object", "properties": {}}
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": IMPOSSIBLE}}
OUTPUT = {"format": {"type": "json_schema", "schema": IMPOSSIBLE}}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": GOOD} | fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": FORMAT}, "text.format"),
        ({"tools": [function(), function(name="g", parameters=LIST)]}, "tools.1.parameters"),
        ({"tools": [function(), function()]}, "tools.1.name"),
        ({"tools": [function()], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [function()], "text": FORMAT}, "text.format"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "7"}]}, "input.0.call_id"),
        ({"top_logprobs": 20, "max_output_tokens": 10**9}, "max_output_tokens"),
        ({"response_format": {"type": "text"}}, "response_format"),  # sent so, and not known here
    ],
    ids=str,
)
def test_responses_are_told_of_their_own_fields(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = refusal(client, "/v1/responses", {"model": SMOLLM2, "input": "Hi"} | fields)
    assert error["param"] == param
    if error["code"] != "unknown_field":
        assert not any(word in error["message"] for word in ("response_format", "function.", "messages", "guided"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"output_config": OUTPUT}, "output_config.format: "),
        ({"tools": [{"name": "f", "input_schema": LIST}]}, "tools.0.input_schema has type"),
        ({"tools": [{"name": "f", "input_schema": GOOD}], "output_config": OUTPUT}, "output_config.format"),
        ({"stop_sequences": ["é" * 129]}, "stop_sequences has a string of 258 bytes"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages.0.content.0 is the result",
        ),
        (
            {"messages": [{"role": "user", "content": []}]},
            "messages.0.content is a list of length 0; give at least",
        ),
    ],
    ids=str,
)
def test_messages_are_told_of_their_own_fields(client: httpx.Client, fields: dict[str, Any], words: str) -> None:
    asked = {"model": SMOLLM2, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    told = client.post("/v1/messages", json=asked | fields)
    assert told.status_code == 400, told.text
    assert words in told.json()["error"]["message"]
    assert "response_format" not in told.text


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"stop": ["x"] * 17}, "stop", "at most 16"),
        (CHAT, {"stop": "x" * 257}, "stop", "at most 256"),
        (CHAT, {"guided_json": ""}, "guided_json", "at least 1 character"),
        (CHAT, {"tool_choice": "some"}, "tool_choice", "'required'"),
        ("/v1/responses", {"input": []}, "input", "at least 1 item"),
    ],
    ids=str,
)
def test_of_several_types_the_one_that_was_sent_is_spoken_of(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    body = chat_body(**fields) if path == CHAT else {"model": SMOLLM2} | fields
    error = refusal(client, path, body)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat_body(logit_bias={str(VOCABULARY): 1}), "logit_bias"),
        (CHAT, chat_body(stop_token_ids=[VOCABULARY]), "stop_token_ids"),
        (TEXT, text_body([[1, VOCABULARY]]), "prompt"),
    ],
    ids=["logit_bias", "stop_token_ids", "prompt"],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_field(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(client, path, body)["param"] == param


def test_a_stop_string_that_is_too_long_is_not_repeated(client: httpx.Client) -> None:
    error = refusal(client, CHAT, chat_body(stop=["geheim" + "é" * 200]))
    assert error["param"] == "stop"
    assert "406 bytes" in error["message"]
    assert "geheim" not in error["message"]


@pytest.mark.parametrize("field", ["thread", "compaction", "fallbacks"])
def test_what_only_anthropic_keeps_is_refused_by_name_even_where_unknown_fields_are_dropped(field: str) -> None:
    asked = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], field: {"type": "create"}}
    with pytest.raises(ValueError, match="not supported here"):
        MessagesBody.model_validate(asked, extra="ignore")


def test_a_refused_thread_says_so_in_the_details_that_anthropics_client_reads(client: httpx.Client) -> None:
    asked = {"model": SMOLLM2, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    told = client.post("/v1/messages", json={**asked, "thread": {"type": "create"}})
    assert told.status_code == 400
    details = told.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    other = client.post("/v1/messages", json={**asked, "compaction": {"type": "auto"}})
    assert other.status_code == 400
    assert "details" not in other.json()["error"]


def test_anthropics_client_finds_the_id_of_answers_and_errors(server: ServerProcess) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as claude:
        hi: Any = [{"role": "user", "content": "Hi"}]
        answer = claude.messages.create(model=SMOLLM2, messages=hi, max_tokens=1)
        assert answer.id == f"msg_{answer._request_id}"
        with claude.messages.stream(model=SMOLLM2, messages=hi, max_tokens=1) as stream:
            assert stream.get_final_message().id == f"msg_{stream.request_id}"
        with pytest.raises(anthropic.BadRequestError) as refused:
            claude.messages.create(model=SMOLLM2, messages=hi, max_tokens=0)
        assert refused.value.request_id
        assert refused.value.request_id == refused.value.response.headers["x-request-id"]


def test_only_anthropics_paths_carry_the_second_name_of_the_id(client: httpx.Client) -> None:
    for path, has_both in (("/v1/models", True), ("/v1/messages/unknown", True), ("/health", False)):
        headers = client.get(path).headers
        assert headers["x-request-id"]
        assert headers.get("request-id") == (headers["x-request-id"] if has_both else None)
