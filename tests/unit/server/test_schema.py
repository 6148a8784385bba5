"""What holds for every body: null is the same as leaving a field out, whatever its name; and pages of the models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

import kvarn.server.app  # noqa: F401 - every body is defined
from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.api.schema import Body, InvalidField
from kvarn.server.models.schema import Page

IDS = ["a", "b", "c", "d"]


def bodies(model: type[Body] = Body) -> Iterator[type[Body]]:
    for child in model.__subclasses__():
        yield child
        yield from bodies(child)


@pytest.mark.parametrize("model", sorted(set(bodies()), key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_a_name_that_no_body_has_may_be_null_and_nothing_else(model: type[Body]) -> None:
    assert all(one["type"] == "missing" for one in errors_of(model, {"stranger": None}))
    for value in (0, "", False, [], {}):
        assert any(one["type"] == "extra_forbidden" for one in errors_of(model, {"stranger": value}))
    assert model.model_json_schema()["additionalProperties"] == {"type": "null"}


def errors_of(model: type[Body], data: object) -> list[dict[str, object]]:
    try:
        model.model_validate(data)
    except ValidationError as error:
        return [dict(one) for one in error.errors()]
    return []


def test_the_rule_holds_for_objects_inside_objects() -> None:
    function = {"name": "f", "arguments": "{}", "stranger": None}
    call = {"id": "c", "type": "function", "function": function, "stranger": None}
    message = {"role": "assistant", "tool_calls": [call], "stranger": None}
    assert ChatBody.model_validate({"model": "m", "messages": [message], "stranger": None}).messages
    for thing, place in [(function, "function"), (call, "tool_calls.0"), (message, "assistant")]:
        thing["stranger"] = 0
        (error,) = errors_of(ChatBody, {"model": "m", "messages": [message]})
        assert error["type"] == "extra_forbidden"
        assert ".".join(map(str, error["loc"])).endswith(f"{place}.stranger")
        thing["stranger"] = None


@pytest.mark.parametrize(
    ("query", "wanted", "has_more"),
    [
        ({}, "abcd", False),
        ({"limit": "1000"}, "abcd", False),
        ({"limit": "4"}, "abcd", False),
        ({"limit": "3"}, "abc", True),
        ({"after_id": "b"}, "cd", False),
        ({"after_id": "a", "limit": "2"}, "bc", True),
        ({"after_id": "d"}, "", False),
        ({"before_id": "c"}, "ab", False),
        ({"before_id": "d", "limit": "2"}, "bc", True),
        ({"before_id": "c", "limit": "2"}, "ab", False),
        ({"before_id": "a", "limit": "2"}, "", False),
        ({"colour": "blue"}, "abcd", False),
    ],
    ids=str,
)
def test_a_page_is_a_part_of_the_list(query: dict[str, str], wanted: str, has_more: bool) -> None:
    part, is_more = Page.of(query).cut(IDS)
    assert ("".join(IDS[part]), is_more) == (wanted, has_more)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *(({"limit": bad}, "limit") for bad in ("0", "1001", "-1", "1.5", "", "x", "01", "１", "1" * 99)),
        ({"after_id": "z"}, "after_id"),
        ({"before_id": ""}, "before_id"),
        ({"after_id": "a", "before_id": "d"}, "before_id"),
    ],
    ids=str,
)
def test_a_page_that_cannot_be_is_refused_by_name(query: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidField) as refused:
        Page.of(query).cut(IDS)
    assert refused.value.field == param
