"""A conversation is checked field by field before anything is rendered."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from kvarn.errors import InvalidParameter
from kvarn.tokenizer.chat.template import RESERVED, ChatRequest

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        {"role": "user"},
        ["hi"],
        [{"content": "hi"}],
        [{"role": "User", "content": "hi"}],
        [{"role": "root", "content": "hi"}],
        [{"role": ["user"], "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "hi", "extra": float("nan")}],
        [{"role": "user", "content": "hi", "extra": object()}],
        [{"role": "user", "content": "hi", "extra": {1: 2}}],
        [{"role": "assistant", "content": None, "tool_calls": "x"}],
    ],
)
def test_a_bad_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidParameter):
        ChatRequest.checked([USER, *messages] if isinstance(messages, list) and messages else messages)


def test_the_refusal_names_the_message_and_the_known_roles() -> None:
    with pytest.raises(InvalidParameter, match=r"messages\[1\] has role 'bot'; known are system, user"):
        ChatRequest.checked([USER, {"role": "bot", "content": ""}])


def test_depth_is_bounded() -> None:
    deep: Any = "x"
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(InvalidParameter, match="64 levels"):
        ChatRequest.checked([{**USER, "extra": deep}])


@pytest.mark.parametrize("turn", [{}, {"content": None}, {"content": None, "tool_calls": None}, {"tool_calls": []}])
def test_an_assistant_that_said_nothing_said_an_empty_text(turn: dict[str, Any]) -> None:
    checked = ChatRequest.checked([USER, {"role": "assistant", **turn}])
    assert checked.messages[1]["content"] == ""


def test_null_stays_null_beside_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    checked = ChatRequest.checked([USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert checked.messages[1]["content"] is None


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatRequest.checked([{"role": "user", "content": parts}]).messages == [{"role": "user", "content": "ab"}]


def test_an_assistant_may_call_tools_without_saying_anything() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    request = ChatRequest.checked([USER, {"role": "assistant", "tool_calls": [call]}])
    assert request.messages[1]["content"] is None
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}


def test_arguments_that_are_no_json_object_stay_text() -> None:
    call = {"function": {"name": "f", "arguments": "not json"}}
    request = ChatRequest.checked([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == "not json"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_template_arguments_cannot_replace_what_kvarn_sets(name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        ChatRequest.checked([USER], kwargs={name: "x"})


@pytest.mark.parametrize("kwargs", [5, ["a"], {"a b": 1}, {1: 2}, {"_x": 1}, {"__class__": 1}, {"x": object()}])
def test_bad_template_arguments_are_refused(kwargs: Any) -> None:
    with pytest.raises(InvalidParameter):
        ChatRequest.checked([USER], kwargs=kwargs)


@pytest.mark.parametrize("tools", [5, "x", {"a": 1}, ["x"], [{"a": object()}]])
def test_bad_tools_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidParameter):
        ChatRequest.checked([USER], tools=tools)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": [' + ",".join(f'"v{number}"' for number in range(400_000)) + "]}",
        '{"x": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}",
        "{" + ",".join(f'"n{number}": {{}}' for number in range(200_000)) + "}",
    ],
    ids=["values", "lists", "members"],
)
def test_arguments_of_a_call_are_bounded_before_they_take_memory(arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tracemalloc.start()
    with pytest.raises(InvalidParameter, match="65,536 values"):
        ChatRequest.checked(messages)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(arguments)
