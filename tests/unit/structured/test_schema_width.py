"""A schema with more properties open at one place than the parser holds is refused before it is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from kvarn.errors import ConstraintError
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.lazy_grammar import lazy_grammar
from kvarn.server.chat.output.tools import ToolSpec, check_tools
from kvarn.structured.constraints import JsonSchema
from kvarn.structured.schema_width import MAX_OPEN
from tests.unit.structured.constrained import compiler, tokenizer

FORMAT = OutputFormat(tool_format="json")


def wide(number: int, *required: int, prefix: str = "p") -> dict[str, Any]:
    properties = {f"{prefix}{index}": {"type": "integer"} for index in range(number)}
    return {"type": "object", "properties": properties, "required": [f"{prefix}{index}" for index in required]}


@pytest.mark.parametrize(
    "schema",
    [
        wide(2000),
        wide(MAX_OPEN + 1),
        {"type": "array", "items": wide(600)},
        {"anyOf": [wide(300), wide(300, prefix="q")]},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, wide(300)]}, "b": wide(300, prefix="q")},
        },
        {"type": "object", "properties": {"inner": wide(600)}, "required": ["inner"]},
    ],
    ids=["many", "one too many", "items", "alternatives", "references", "inner"],
)
def test_more_than_the_parser_holds_is_refused_with_the_number_and_a_remedy(schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match=r"properties of which any may come next, at most 490 .* required"):
        JsonSchema(schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (wide(MAX_OPEN), "{"),
        (wide(MAX_OPEN), '{"p0":1, '),
        (wide(900, 450), "{"),
        ({"anyOf": [wide(240), wide(240, prefix="q")]}, "{"),
        ({"type": "object", "properties": {f"o{n}": wide(200) for n in range(4)}}, '{"o0":{'),
        ({"enum": [wide(600)]}, "{"),
        ({"type": "object", "properties": {"next": {"$ref": "#"}}}, '{"next":{'),
    ],
    ids=["many", "after one", "a required one between", "alternatives", "objects of their own", "data", "itself"],
)
def test_what_it_holds_is_followed(schema: dict[str, Any], text: str) -> None:
    matcher = compiler("byte").compile(JsonSchema(schema)).matcher()
    ids = tokenizer("byte").encode(text, add_special=False)
    assert matcher.mask_after(ids, 0) is not None
    assert matcher.error is None


def test_a_long_chain_of_references_is_left_to_the_compiler() -> None:
    definitions = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(3000)}
    assert JsonSchema({"$ref": "#/$defs/d0", "$defs": definitions}).text


def test_the_schemas_of_tools_are_held_to_the_same() -> None:
    def tools(**more: Any) -> tuple[ToolSpec, ...]:
        return check_tools([{"type": "function", "function": {"name": "f", "parameters": wide(600), **more}}])

    with pytest.raises(ConstraintError, match="600 properties"):
        lazy_grammar(FORMAT, tools())
    assert "p599" not in lazy_grammar(FORMAT, tools(), is_loose=True).text
    with pytest.raises(ConstraintError, match="600 properties"):
        lazy_grammar(FORMAT, tools(strict=True), is_loose=True)
