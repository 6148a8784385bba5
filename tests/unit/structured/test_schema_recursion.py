"""A schema that nothing of finite length follows is refused before anything is computed; all others are not."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvarn.errors import ConstraintError
from kvarn.structured.constraints import JsonSchema
from kvarn.structured.schema_recursion import check_recursion

SELF = {"$ref": "#"}
NULL = {"type": "null"}


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def with_defs(schema: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    return {**schema, "$defs": definitions}


A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
ENDLESS = {
    "itself": SELF,
    "a property": an_object("next", next=SELF),
    "one of several properties": an_object("value", "next", value={"type": "string"}, next=SELF),
    "two definitions": with_defs(A, a=an_object("b", b=B), b=an_object("a", a=A)),
    "references to each other": with_defs(A, a=B, b=A),
    "a list that is not empty": {"type": "array", "minItems": 1, "items": SELF},
    "the first items": {"type": "array", "minItems": 2, "prefixItems": [NULL, SELF]},
    "all of": {"allOf": [SELF]},
    "required beside the properties": {
        "allOf": [{"type": "object", "properties": {"a": SELF}}, {"required": ["a"]}],
    },
    "a length beside the items": {"type": "array", "allOf": [{"items": SELF}, {"minItems": 1}]},
    "every alternative": {"anyOf": [an_object("a", a=SELF), {"type": "array", "minItems": 1, "items": SELF}]},
    "one of": {"oneOf": [SELF]},
    "other properties": {"type": "object", "required": ["x"], "additionalProperties": SELF},
    "a part that may be left out": an_object(a=with_defs(A, a=NULL) | {"$ref": "#/properties/a"}),
    "an alternative that need not be chosen": {"anyOf": [NULL, {"$ref": "#/anyOf/1"}]},
}
ENDING = {
    "a list of nodes": an_object("value", "next", value={"type": "string"}, next={"anyOf": [SELF, NULL]}),
    "a tree": an_object("children", children={"type": "array", "items": SELF}),
    "a property that may be left out": an_object("value", value=NULL, next=SELF),
    "null or an object": {"type": ["object", "null"], "required": ["a"], "properties": {"a": SELF}},
    "two definitions": with_defs(A, a=an_object("b", b=B), b={"anyOf": [A, {"type": "integer"}]}),
    "a constant": {"const": {"a": 1}, "allOf": [SELF]},
    "an unused definition": with_defs({"type": "string"}, a=A),
    "no additional properties": an_object("a", a=A) | {"additionalProperties": False, "$defs": {"a": NULL}},
    "a reference that leads nowhere": {"$ref": "#/nowhere"},  # for the compiler to refuse
    "data, not schemas": an_object("$ref", **{"$ref": {"type": "string"}}) | {"examples": [SELF]},
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS.keys())
def test_what_cannot_end_is_refused_with_a_remedy(schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match=r"cannot be followed to an end.* make the recursion optional"):
        JsonSchema(schema)


@pytest.mark.parametrize("schema", ENDING.values(), ids=ENDING.keys())
def test_what_can_end_is_taken(schema: dict[str, Any]) -> None:
    assert JsonSchema(schema).text


def chain(number: int, *, is_backward: bool) -> dict[str, Any]:
    order = range(number) if is_backward else range(number - 1, -1, -1)
    parts = {f"d{at}": an_object("x", x={"$ref": f"#/$defs/d{at + 1}"}) for at in order}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{number}": NULL}}


def shared(number: int) -> dict[str, Any]:
    """Many parts that hold together with one of many properties."""
    names = [f"p{at}" for at in range(number)]
    giant = {"type": "object", "properties": dict.fromkeys(names, NULL), "required": names}
    parts = {f"d{at}": {"allOf": [{"$ref": "#/$defs/giant"}]} for at in range(number)}
    return {"type": "object", "properties": {f"x{at}": {"$ref": f"#/$defs/d{at}"} for at in range(number)}} | {
        "$defs": {"giant": giant, **parts}
    }


@pytest.mark.parametrize("make", [lambda n: chain(n, is_backward=True), lambda n: chain(n, is_backward=False), shared])
def test_the_time_grows_with_the_schema_and_not_faster(make: Any) -> None:
    times = {number: min(_seconds(make(number)) for _ in range(3)) for number in (500, 4000)}
    assert times[4000] < 30 * times[500], times


def _seconds(schema: dict[str, Any]) -> float:
    began = time.thread_time()
    check_recursion(schema)
    return max(time.thread_time() - began, 1e-4)
