"""Tools of requests: what is refused, by which name."""

from __future__ import annotations

from typing import Any

import pytest

from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.output.tools import MAX_TOOLS, NamedFunction, check_choice, check_tools

DEEP: dict[str, Any] = {}
for _ in range(100_000):
    DEEP = {"type": "object", "properties": DEEP}


def tool(name: object = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
        ([tool("")], "tools.0.function.name"),
        ([tool("a b")], "tools.0.function.name"),
        ([tool("f\n")], "tools.0.function.name"),
        ([tool("é")], "tools.0.function.name"),
        ([tool("f" * 129)], "tools.0.function.name"),
        ([tool(None)], "tools.0.function.name"),
        ([tool(), tool()], "tools.1.function.name"),
        ([tool(description="x" * 131_073)], "tools.0.function.description"),
        ([tool(description=1)], "tools.0.function.description"),
        ([tool(parameters=[])], "tools.0.function.parameters"),
        ([tool(parameters={"type": "string"})], "tools.0.function.parameters"),
        ([tool(parameters={"type": "object", "description": "x" * 70_000})], "tools.0.function.parameters"),
        ([tool(parameters={"type": "object", "maximum": float("nan")})], "tools.0.function.parameters"),
        ([tool(parameters=DEEP)], "tools.0.function.parameters"),
        ([{"type": "retrieval"}], "tools.0"),
        ([{"type": "function"}], "tools.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_tools_are_refused_by_the_name_of_the_field(tools: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidField) as refused:
        check_tools(tools)
    assert refused.value.field == param


def test_the_largest_allowed_list_passes() -> None:
    assert len(check_tools([tool(f"f-{i}_") for i in range(MAX_TOOLS)])) == MAX_TOOLS


def test_a_function_without_parameters_takes_an_empty_object() -> None:
    (checked,) = check_tools([tool()])
    assert checked.arguments_schema == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_schema_that_speaks_of_other_members_keeps_its_word() -> None:
    (checked,) = check_tools([tool(parameters={"type": "object", "additionalProperties": {"type": "integer"}})])
    assert checked.arguments_schema["additionalProperties"] == {"type": "integer"}


def test_a_choice_must_name_one_of_the_tools() -> None:
    tools = check_tools([tool("auto")])
    check_choice(tools, NamedFunction("auto"))
    with pytest.raises(InvalidField, match="not among the tools"):
        check_choice(tools, NamedFunction("f"))


def test_a_call_cannot_be_required_without_tools() -> None:
    with pytest.raises(InvalidField, match="there are no tools"):
        check_choice((), "required")
