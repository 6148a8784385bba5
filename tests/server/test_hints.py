"""What clients ask for by the way: hints we cannot honour are dropped and named in a header, in every dialect."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvarn.server.chat.output.tools import MAX_DESCRIPTION_CHARACTERS
from tests.server.asking import CHAT, TEXT, answer, chat_body, chunks, refusal, text_body
from tests.server.keyed import KeyedServer
from tests.server.process import SMOLLM2

pytestmark = pytest.mark.model
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
WARNING = "x-kvarn-warning"
CONTEXT = 2048  # of the shared server
HI: dict[str, dict[str, Any]] = {
    CHAT: chat_body("Hi", max_tokens=4),
    TEXT: text_body("Hi", max_tokens=4),
    MESSAGES: {"model": SMOLLM2, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0},
    RESPONSES: {"model": SMOLLM2, "max_output_tokens": 4, "input": "Hi", "temperature": 0},
}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (TEXT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (MESSAGES, {"output_config": {"effort": "max"}}, "output_config.effort"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        (RESPONSES, {"reasoning": {"effort": "medium", "summary": "auto"}}, "reasoning.effort"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "verbosity"),
        (RESPONSES, {"tools": [{"type": "web_search", "external_web_access": False}]}, "web_search"),
        (RESPONSES, {"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]}, "namespace"),
    ],
    ids=str,
)
def test_a_hint_is_dropped_and_named(client: httpx.Client, path: str, fields: dict[str, Any], named: str) -> None:
    plain, hinted = (client.post(path, json=body) for body in (HI[path], HI[path] | fields))
    assert hinted.status_code == 200, hinted.text
    assert WARNING not in plain.headers
    assert named in hinted.headers[WARNING]
    assert told(plain) == told(hinted)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "none"}),  # as it is anyway
        (MESSAGES, {"thinking": {"type": "adaptive"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (RESPONSES, {"reasoning": {}, "client_metadata": {"x": "y"}, "include": ["reasoning.encrypted_content"]}),
    ],
    ids=str,
)
def test_what_is_as_asked_is_no_reason_to_warn(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    hinted = client.post(path, json=HI[path] | fields)
    assert hinted.status_code == 200, hinted.text
    assert WARNING not in hinted.headers


def test_a_stream_has_the_warning_too(client: httpx.Client) -> None:
    body = HI[MESSAGES] | {"stream": True, "output_config": {"effort": "high"}}
    with client.stream("POST", MESSAGES, json=body) as streamed:
        assert streamed.status_code == 200
        assert "output_config.effort" in streamed.headers[WARNING]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "utmost"}),
        (MESSAGES, {"output_config": {"effort": 3}}),
        (RESPONSES, {"reasoning": {"effort": "utmost"}}),
        (RESPONSES, {"tools": [{"type": "mcp", "server_url": "https://example.org"}]}),
    ],
    ids=str,
)
def test_a_hint_that_means_nothing_is_refused(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    assert client.post(path, json=HI[path] | fields).status_code == 400


class TestMaxTokens:
    def test_messages_are_answered_within_the_context_and_told_so(self, client: httpx.Client) -> None:
        asked = HI[MESSAGES] | {"max_tokens": 32_000, "stop_sequences": ["a", "e", "o"]}
        given = client.post(MESSAGES, json=asked)
        assert given.status_code == 200, given.text
        usage = given.json()["usage"]
        num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert f"max_tokens lowered from 32000 to {CONTEXT - num_prompt}" in given.headers[WARNING]

    def test_other_dialects_refuse_it_as_their_services_do(self, client: httpx.Client) -> None:
        assert refusal(client, CHAT, HI[CHAT] | {"max_tokens": 32_000})["code"] == "context_length_exceeded"
        error = refusal(client, RESPONSES, HI[RESPONSES] | {"max_output_tokens": 32_000})
        assert error["param"] == "max_output_tokens"

    def test_a_tier_that_allows_fewer_tokens_a_minute_lowers_it_too(self, keyed: KeyedServer) -> None:
        with keyed.client("hinted") as client:
            given = client.post(MESSAGES, json=HI[MESSAGES] | {"max_tokens": 32_000})
        assert given.status_code == 200, given.text
        assert "max_tokens lowered from 32000" in given.headers[WARNING]

    def test_a_prompt_beyond_the_context_is_refused_in_the_words_that_agents_look_for(
        self, client: httpx.Client
    ) -> None:
        for words in ("word " * 2500, "word " * 50_000):
            body = HI[MESSAGES] | {"messages": [{"role": "user", "content": words}]}
            refused = client.post(MESSAGES, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        (CHAT, {"type": "function", "function": {"name": "f" * 128, "description": "="}}),
        (MESSAGES, {"name": "f" * 128, "input_schema": {"type": "object"}, "description": "="}),
        (RESPONSES, {"type": "function", "name": "f" * 128, "description": "="}),
    ],
    ids=[CHAT, MESSAGES, RESPONSES],
)
def test_a_description_may_be_a_manual(client: httpx.Client, path: str, tool: dict[str, Any]) -> None:
    """It is read by the model, so the context is the limit that is met first."""
    for num_characters, words in ((MAX_DESCRIPTION_CHARACTERS, "tokens"), (MAX_DESCRIPTION_CHARACTERS + 1, "131,072")):
        described = (tool.get("function") or tool) | {"description": "word " * (num_characters // 5 + 1)}
        described["description"] = described["description"][:num_characters]
        body = HI[path] | {"tools": [tool | {"function": described} if "function" in tool else described]}
        refused = client.post(path, json=body)
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": PICTURE}}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}),
        (
            MESSAGES,
            {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": {"type": "url"}}]},
        ),
        (RESPONSES, {"type": "input_image", "image_url": PICTURE, "detail": "auto"}),
    ],
    ids=["chat", "messages", "tool result", "responses"],
)
def test_images_are_refused_in_plain_words(client: httpx.Client, path: str, part: dict[str, Any]) -> None:
    turn = {"role": "user", "content": [part]}
    body = {name: value for name, value in HI[path].items() if name not in ("messages", "input")}
    refused = client.post(path, json=body | ({"input": [turn]} if path == RESPONSES else {"messages": [turn]}))
    assert refused.status_code == 400
    assert "images are not supported by this model" in refused.json()["error"]["message"]
    assert "iVBORw0KGgo" not in refused.text


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 2])
def test_continuous_usage_counts_the_tokens_so_far_in_every_chunk(client: httpx.Client, path: str, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = (chat_body if path == CHAT else text_body)(max_tokens=8, n=n, ignore_eos=True, stream_options=options)
    *read, last = chunks(client, path, body)
    whole = answer(client, path, {name: value for name, value in body.items() if name != "stream_options"})["usage"]
    counted = [chunk["usage"]["completion_tokens"] for chunk in read]
    assert counted == sorted(counted)
    assert len(set(counted)) > 1  # one for each chunk; several tokens may come in one
    assert counted[-1] == last["usage"]["completion_tokens"] == whole["completion_tokens"] == 8 * n
    assert {chunk["usage"]["prompt_tokens"] for chunk in read} == {whole["prompt_tokens"]}
    assert not last["choices"]


def test_a_format_of_the_text_has_no_effect_where_the_answer_must_be_a_call(client: httpx.Client) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}}
    tools = {"tools": [{"type": "function", "function": function}], "response_format": {"type": "json_object"}}
    choice = {"type": "function", "function": {"name": "f"}}
    body = chat_body("Hi", max_tokens=60, parallel_tool_calls=False, **tools)
    (call,) = answer(client, CHAT, body | {"tool_choice": choice})["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f"


def told(response: httpx.Response) -> Any:
    body = response.json()
    if "choices" in body:
        return body["choices"]
    return [block.get("text") or block["content"][0]["text"] for block in body.get("content") or body["output"]]
