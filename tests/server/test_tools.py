"""Tools over the wire, on SmolLM2, whose template knows none: choices, streams, history and limits (B10)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvarn.server.chat.output.tool_prompt import TOOL_PROMPT
from tests.server.asking import CHAT, answer, chat_body, chunks, refusal

pytestmark = pytest.mark.model

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
QUESTION = "What will the weather be like in Oslo tomorrow?"


def tool(name: str = "weather", parameters: Any = None, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or WEATHER, **function}}


TOOLS = [tool(description="Forecast for a city"), tool("now", {"type": "object", "properties": {}})]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def asked(**fields: Any) -> dict[str, Any]:
    return chat_body(QUESTION, **{"tools": TOOLS, "max_tokens": 60, **fields})


def told(read: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of a stream add up to, and why it ended."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for choice in (choice for chunk in read for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                assert call["id"].startswith("call_")
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return {**message, "finish_reason": reason}


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice in the shape of told()."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"content": message["content"] or "", "tool_calls": calls, "finish_reason": choice["finish_reason"]}


def check_weather(arguments: str) -> None:
    parsed = json.loads(arguments)
    assert parsed.keys() == {"city", "days"}
    assert parsed["city"] in ("Paris", "Oslo")
    assert 1 <= parsed["days"] <= 9


def test_a_named_function_is_called_exactly_once(client: httpx.Client) -> None:
    (choice,) = answer(client, CHAT, asked(tool_choice=named("weather")))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    check_weather(call["function"]["arguments"])
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_a_named_function_without_parameters_gets_an_empty_object(client: httpx.Client) -> None:
    (choice,) = answer(client, CHAT, asked(tool_choice=named("now")))["choices"]
    assert whole(choice)["tool_calls"] == [{"name": "now", "arguments": "{}"}]


def test_a_required_call_is_one_of_the_tools(client: httpx.Client) -> None:
    (choice,) = answer(client, CHAT, asked(tool_choice="required", parallel_tool_calls=False))["choices"]
    (call,) = whole(choice)["tool_calls"]
    if call["name"] == "weather":
        check_weather(call["arguments"])
    else:
        assert call == {"name": "now", "arguments": "{}"}


def test_required_calls_may_be_several(client: httpx.Client) -> None:
    body = asked(tool_choice="required", max_tokens=120, temperature=1.5, n=3, seed=7)
    choices = answer(client, CHAT, body)["choices"]
    finished = [whole(choice) for choice in choices if choice["finish_reason"] == "tool_calls"]
    assert all(1 <= len(choice["message"]["tool_calls"]) <= 16 for choice in choices)
    for call in (call for one in finished for call in one["tool_calls"] if call["name"] == "weather"):
        check_weather(call["arguments"])


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_free_model_answers_in_text_or_calls_a_known_function(client: httpx.Client, choice: str | None) -> None:
    (one,) = answer(client, CHAT, asked(tool_choice=choice, max_tokens=24))["choices"]
    found = whole(one)
    assert found["content"] or found["tool_calls"]
    assert all(call["name"] in ("weather", "now") for call in found["tool_calls"])
    assert choice != "none" or not found["tool_calls"]


REPORT = {
    "type": "object",
    "properties": {"summary": {"enum": ["sunny", "rainy"]}},
    "required": ["summary"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("bias", "is_call"), [(100, True), (-100, False)])
def test_with_a_format_a_free_model_calls_or_writes_in_that_format(
    client: httpx.Client, bias: int, is_call: bool
) -> None:
    """What the model would choose is its own affair: the bias on the first letters of both makes the choice here."""
    ids = answer(client, "/tokenize", {"prompt": "name", "add_special_tokens": False})["tokens"]
    format = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT, "strict": True}}
    body = asked(response_format=format, logit_bias={str(ids[0]): bias}, parallel_tool_calls=False)
    (choice,) = answer(client, CHAT, body)["choices"]
    found = whole(choice)
    assert bool(found["tool_calls"]) == is_call
    if is_call:
        assert choice["finish_reason"] == "tool_calls"
        assert found["content"] == ""
        for call in found["tool_calls"]:
            assert call["name"] == "now" or check_weather(call["arguments"]) is None
    else:
        assert json.loads(found["content"])["summary"] in ("sunny", "rainy")
    assert told(chunks(client, CHAT, body)) == found


def test_with_any_json_object_wanted_a_free_model_writes_one_or_calls(client: httpx.Client) -> None:
    (choice,) = answer(client, CHAT, asked(response_format={"type": "json_object"}, max_tokens=12))["choices"]
    found = whole(choice)
    assert found["tool_calls"] or found["content"].startswith("{")


@pytest.mark.parametrize(
    ("format", "tools", "param"),
    [
        ({"type": "array", "uniqueItems": True}, TOOLS, "response_format"),
        (REPORT, [tool(parameters={"type": "object", "patternProperties": {"(?=x)y": {}}}, strict=True)], "tools"),
    ],
)
def test_what_cannot_be_followed_beside_tools_names_its_field(
    client: httpx.Client, format: Any, tools: Any, param: str
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "report", "schema": format}}
    assert refusal(client, CHAT, asked(response_format=wanted, tools=tools))["param"] == param


def test_none_is_as_if_no_tools_had_been_given(client: httpx.Client) -> None:
    with_tools = answer(client, CHAT, asked(tool_choice="none", max_tokens=8))
    without = answer(client, CHAT, chat_body(QUESTION, max_tokens=8))
    assert with_tools["choices"] == without["choices"]
    assert with_tools["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "n": 2, "temperature": 1.0, "seed": 3},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": "required", "max_tokens": 15},
        {"tool_choice": "auto", "max_tokens": 20, "n": 2, "temperature": 1.0, "seed": 5},
        {"tool_choice": "auto", "parallel_tool_calls": False, "max_tokens": 20},
        {"tool_choice": "none", "max_tokens": 8},
    ],
    ids=["required", "named", "cut off", "auto", "one at most", "none"],
)
def test_a_stream_adds_up_to_the_whole_answer(client: httpx.Client, fields: dict[str, Any]) -> None:
    body = asked(**fields)
    choices = answer(client, CHAT, body)["choices"]
    read = chunks(client, CHAT, body)
    assert [told(read, choice["index"]) for choice in choices] == [whole(choice) for choice in choices]


def test_enforced_arguments_stream_while_they_are_written(client: httpx.Client) -> None:
    read = chunks(client, CHAT, asked(tool_choice=named("weather")))
    pieces = [call for chunk in read for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert len([piece for piece in pieces if piece["function"]["arguments"]]) > 3


def test_a_call_that_was_cut_off_ends_by_length(client: httpx.Client) -> None:
    (choice,) = answer(client, CHAT, asked(tool_choice=named("weather"), max_tokens=14))["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = whole(choice)["tool_calls"]
    assert call["name"] == "weather"
    with pytest.raises(ValueError):
        json.loads(call["arguments"])


def test_a_call_that_a_stop_string_cut_off_ends_by_stop(client: httpx.Client) -> None:
    body = asked(tool_choice=named("weather"), stop=["days"])
    (choice,) = answer(client, CHAT, body)["choices"]
    assert choice["finish_reason"] == "stop"
    (call,) = whole(choice)["tool_calls"]
    with pytest.raises(ValueError):
        json.loads(call["arguments"])
    assert told(chunks(client, CHAT, body)) == whole(choice)


def test_a_streamed_answer_of_calls_alone_has_no_content(client: httpx.Client) -> None:
    read = chunks(client, CHAT, asked(tool_choice=named("weather")))
    assert {choice["delta"].get("content") for chunk in read for choice in chunk["choices"]} == {None}


def test_the_model_calls_what_it_was_told_to_repeat(client: httpx.Client) -> None:
    call = '{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}'
    history = [
        {"role": "user", "content": f"Say: {call}"},
        {"role": "assistant", "content": call},
        {"role": "user", "content": f"Say: {call}"},
        {"role": "assistant", "content": call},
        {"role": "user", "content": f"Say: {call}"},
    ]
    (choice,) = answer(client, CHAT, asked(messages=history))["choices"]
    assert whole(choice)["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Oslo", "days": 1}'}]
    assert choice["finish_reason"] == "tool_calls"


def test_calls_and_results_of_earlier_turns_reach_the_model(client: httpx.Client) -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo", "days": 1}'}
    history = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Snow all day."},
    ]
    prompt = answer(client, "/apply-template", {"messages": history, "tools": TOOLS})["prompt"]
    assert TOOL_PROMPT.partition("\n")[0] in prompt
    assert '{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}' in prompt
    assert "The function weather returned:\nSnow all day." in prompt
    assert answer(client, CHAT, asked(messages=history, max_tokens=8))["choices"][0]["message"]["content"]


def test_the_prompt_about_tools_is_the_one_that_is_counted(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    counted = answer(client, "/tokenize", {"messages": messages, "tools": TOOLS})["count"]
    assert answer(client, CHAT, asked(max_tokens=1))["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool(description="x" * 131_073)]}, "tools.0.function.description"),
        ({"tools": [tool("two words")]}, "tools.0.function.name"),
        ({"tools": [tool("")]}, "tools.0.function.name"),
        ({"tools": [tool("f" * 129)]}, "tools.0.function.name"),
        ({"tools": [tool("f\n")]}, "tools.0.function.name"),
        ({"tools": [tool(), tool()]}, "tools.1.function.name"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters"),
        ({"tools": [tool(parameters={"type": "object", "title": "x" * 66_000})]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": "weather"}, "tools"),
        ({"tool_choice": named("stranger")}, "tool_choice.function.name"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": named("weather")}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"guided_regex": "a+"}, "tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tools_beyond_the_limits_are_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = refusal(client, CHAT, asked(max_tokens=4, **fields))
    assert (error["param"] or "").startswith(param)
    assert error["type"] == "invalid_request_error"
    assert "x" * 100 not in error["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema.json"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["a"]},
    ],
    ids=["remote reference", "look-ahead", "nothing fits"],
)
def test_a_schema_no_grammar_can_follow_is_refused_where_it_must_be_followed(
    client: httpx.Client, schema: dict[str, Any]
) -> None:
    body = asked(tools=[tool(parameters=schema)], tool_choice="required", max_tokens=4)
    assert refusal(client, CHAT, body)["type"] == "invalid_request_error"


def test_128_tools_pass_the_limit_but_not_a_context_that_cannot_hold_them(client: httpx.Client) -> None:
    tools = [tool(f"f{i}", {"type": "object"}) for i in range(128)]
    assert refusal(client, CHAT, asked(tools=tools))["code"] == "context_length_exceeded"
    (choice,) = answer(client, CHAT, asked(tools=tools, tool_choice="none", max_tokens=1))["choices"]
    assert choice["finish_reason"] == "length"
