"""Templates and skeletons: which parts they have, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvarn.errors import ConstraintError, InvalidParameter
from kvarn.fill import Slot, template_parts
from kvarn.fill.skeleton import skeleton
from kvarn.fill.template import NamedSlot, Parts, parse_template
from kvarn.structured.constraints import Grammar, JsonSchema, Regex

PAIR = {"type": "array", "items": {}, "minItems": 2, "maxItems": 2}
TREE = {"type": "object", "properties": {"v": {"type": "null"}, "l": {"$ref": "#/$defs/t"}, "r": {"$ref": "#/$defs/t"}}}


def shape(parts: Parts) -> str:
    return "".join(part if isinstance(part, str) else f"<{part.name}>" for part in parts)


def test_text_and_slots_alternate_as_they_are_written() -> None:
    age = Slot(regex="[0-9]+")
    parts = parse_template("{{name}} is {{ age }}.", {"age": age})
    assert parts == (NamedSlot("name", Slot()), " is ", NamedSlot("age", age), ".")


def test_a_slot_is_named_in_any_language() -> None:
    assert shape(parse_template("{{Größe}}, {{名前}}, {{_x.1-a}} and {{1}}")) == "<Größe>, <名前>, <_x.1-a> and {{1}}"


@pytest.mark.parametrize(
    ("slot", "constraint"),
    [
        (Slot(), None),
        (Slot(regex="a|b"), Regex(" (?:a|b)")),
        (Slot(choices=("x", 'y"')), Grammar('start: " x" | " y\\""')),
        (Slot(schema={"type": "null"}), JsonSchema({"type": "null"})),
    ],
)
def test_a_space_before_a_slot_is_the_beginning_of_its_text(slot: Slot, constraint: object) -> None:
    assert slot.constraint(after_space=True) == constraint


@pytest.mark.parametrize(
    ("template", "slots", "field"),
    [
        ("no slot", {}, "template"),
        ("{{a}} {{a}}", {}, "template"),
        ("{{a}}", {"b": Slot()}, "slots"),
        ("{{a}}" + "x" * (1 << 20), {}, "template"),
        ("".join(f"{{{{s{i}}}}}" for i in range(300)), {}, "template"),
        ({"type": "object", "properties": {"a": {}}}, {"a": Slot()}, "slots"),
    ],
)
def test_what_cannot_be_filled_is_refused_by_name(template: Any, slots: dict[str, Slot], field: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        template_parts(template, slots)
    assert error.value.field == field


@pytest.mark.parametrize("fields", [{"regex": "a", "choices": ("b",)}, {"choices": ("",)}, {"max_tokens": 0}])
def test_a_slot_of_two_minds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        Slot(**fields)


def test_a_skeleton_has_a_slot_for_every_value() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "kind": {"const": "a b"},
            "at": {"$ref": "#/$defs/point"},
            "list": {"type": "array", "items": {"type": "integer"}, "minItems": 3},
            "few": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
            "odd": {"type": "object", "minProperties": 1},
        },
        "$defs": {"point": point},
    }
    wanted = (
        '{"name":</name>,"kind":"a b","at":{"x":</at/x>},"list":[</list/0>,</list/1>,</list/2>],"few":[</few/0>],'
        '"odd":</odd>}'
    )
    parts = skeleton(schema)
    assert shape(parts) == wanted
    (name,) = [part for part in parts if isinstance(part, NamedSlot) and part.name == "/name"]
    assert json.loads(json.dumps(name.slot.schema))["maxLength"] == 9


def test_a_schema_that_leaves_nothing_open_is_refused() -> None:
    with pytest.raises(ConstraintError, match="nothing to fill in"):
        skeleton({"type": "object", "properties": {"a": {"const": 1}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "minItems": 10**12},
        {"type": "array", "items": {"const": "x"}, "minItems": 10**12},
        {"$ref": "#/$defs/0", "$defs": {f"{i}": PAIR | {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(9)}},
    ],
    ids=("values", "text", "references"),
)
def test_a_small_schema_of_a_huge_skeleton_is_refused_before_it_is_written(schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match="make it smaller"):
        skeleton(schema)


@pytest.mark.parametrize(
    "wrong", [{"required": 5}, {"required": [["a"]]}, {"type": "array", "items": {}, "minItems": "x"}], ids=str
)
def test_what_is_no_schema_is_left_to_the_constraint_of_a_slot(wrong: dict[str, Any]) -> None:
    (part,) = skeleton({"type": "object", "properties": {"a": {}}} | wrong)
    assert isinstance(part, NamedSlot)


def test_a_reference_within_itself_is_one_slot() -> None:
    parts = skeleton({"type": "object", "properties": {"x": {"$ref": "#/$defs/t"}}, "$defs": {"t": TREE}})
    assert shape(parts) == '{"x":{"v":</x/v>,"l":</x/l>,"r":</x/r>}}'


def test_a_schema_that_refers_to_its_own_parts_is_one_slot() -> None:
    kids = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}]}
    assert shape(skeleton({"type": "object", "properties": {"kids": kids}})) == "</>"


@pytest.mark.parametrize(("schema", "text"), [({"type": "string"}, "</a>"), ({"type": "integer"}, "5"), ({}, "5")])
def test_a_constant_is_text_unless_more_is_said_of_it(schema: dict[str, Any], text: str) -> None:
    both = {"a": {"const": 5, **schema}, "b": {"type": "null"}}
    assert shape(skeleton({"type": "object", "properties": both})) == f'{{"a":{text},"b":</b>}}'


@pytest.mark.parametrize("definitions", [5, [], {"t": 5}], ids=str)
def test_definitions_that_are_none_are_left_to_the_constraint_of_a_slot(definitions: object) -> None:
    (part,) = skeleton({"$ref": "#/$defs/t", "$defs": definitions})
    assert isinstance(part, NamedSlot)


def test_values_whose_paths_look_alike_have_slots_of_their_own() -> None:
    """Of one name for both, the text of one would stand in the place of the other."""
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}, "~1b": {"type": "null"}}}
    schema = {"type": "object", "properties": {"a/b": {"type": "integer"}, "a": inner, "a~1b": {"type": "null"}}}
    wanted = '{"a/b":</a~1b>,"a":{"b":</a/b>,"~1b":</a/~01b>},"a~1b":</a~01b>}'
    assert shape(skeleton(schema)) == wanted


@pytest.mark.parametrize("bounds", [{"minItems": 5, "maxItems": 2}, {"maxItems": -1}, {"minItems": -1}], ids=str)
def test_bounds_that_no_list_meets_are_left_to_the_constraint_of_a_slot(bounds: dict[str, Any]) -> None:
    (part,) = skeleton({"type": "array", "items": {"type": "integer"}} | bounds)
    assert isinstance(part, NamedSlot)
