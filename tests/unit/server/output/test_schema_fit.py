"""Arguments against schemas: agreement with a JSON schema validator, and bounded work."""

from __future__ import annotations

import random
import time
from typing import Any

import jsonschema_rs
import pytest

from kvarn.server.chat.output.schema_fit import fits
from tests.conftest import Size

VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2.5, 3.0, True, False, None, "", "a", "abc", [], [1], ["a", 2], {}, {"a": 1}, {"a": "x", "b": [1]}),
    {"a": {"a": {"a": 1}}},
)

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null", ["array", "object"])


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """Any mixture of the keywords that are checked."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice([True, False, {}, {"type": "string"}, {"type": ["integer", "null"]}, {"const": True}])
    schema: dict[str, Any] = {}
    makers = {
        "type": lambda: rng.choice(
            ["object", "array", "string", "number", "integer", "boolean", "null", ["array", "object"]]
        ),
        "enum": lambda: rng.sample(VALUES, 3),
        "const": lambda: rng.choice(VALUES),
        "minimum": lambda: rng.choice([0, 1.5]),
        "exclusiveMaximum": lambda: rng.choice([1, 3]),
        "minLength": lambda: rng.randint(0, 2),
        "maxLength": lambda: rng.randint(0, 2),
        "properties": lambda: {name: random_schema(rng, depth - 1) for name in ("a", "b")},
        "required": lambda: rng.choice([["a"], ["a", "b"], []]),
        "additionalProperties": lambda: random_schema(rng, depth - 1),
        "maxProperties": lambda: 1,
        "items": lambda: random_schema(rng, depth - 1),
        "prefixItems": lambda: [random_schema(rng, depth - 1)],
        "minItems": lambda: 1,
        "maxItems": lambda: 1,
        **{name: lambda: [random_schema(rng, depth - 1) for _ in range(2)] for name in ("allOf", "anyOf", "oneOf")},
        "not": lambda: random_schema(rng, depth - 1),
        "$ref": lambda: rng.choice(["#/$defs/one", "#/$defs/two~1three"]),
    }
    for name in rng.sample(list(makers), rng.randint(1, 3)):
        schema[name] = makers[name]()
    return schema


def test_it_agrees_with_a_validator(size: Size) -> None:
    rng = random.Random(5)
    verdicts = set()
    for _ in range(size(500, 20_000)):
        schema = random_schema(rng)
        if isinstance(schema, dict):
            schema["$defs"] = {"one": random_schema(rng, 0), "two/three": {"type": "object"}}
        validator = jsonschema_rs.validator_for(schema)
        for value in VALUES:
            assert fits(schema, value) == validator.is_valid(value), (schema, value)
            verdicts.add(fits(schema, value))
    assert verdicts == {True, False}


@pytest.mark.parametrize("keyword", ["pattern", "format", "x-own"])
def test_what_is_not_checked_does_not_make_a_call_text(keyword: str) -> None:
    assert fits({"type": "string", keyword: "^a$"}, "b")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"properties": {"a": {"allOf": [{"$ref": "#"}] * 50}}},
    ],
    ids=["itself", "itself twice", "many branches"],
)
def test_a_schema_that_goes_in_circles_fits_nothing_and_ends_soon(schema: dict[str, Any], patience: float) -> None:
    value: Any = 1
    for _ in range(60):
        value = {"a": value}
    started_at = time.process_time()
    assert not fits(schema, value)
    assert time.process_time() - started_at < 1.0 * patience


def test_a_reference_to_elsewhere_is_not_checked() -> None:
    assert fits({"$ref": "https://example.com/schema.json"}, {"a": 1})
    assert fits({"$ref": "#/$defs/missing"}, {"a": 1})


def test_long_references_and_lists_count_as_work(patience: float) -> None:
    deep: dict[str, Any] = {"$ref": "#" + "/" * 60_000}
    for _ in range(3):
        deep = {"allOf": [deep] * 18}
    listed = {"allOf": [{"enum": list(range(5_000))}] * 20}
    started_at = time.process_time()
    fits(deep, {})
    assert not fits(listed, {})
    assert time.process_time() - started_at < 1.0 * patience


def test_a_required_member_that_is_no_name_is_not_checked() -> None:
    assert fits({"type": "object", "required": [[1], "a"]}, {"a": 1})
    assert not fits({"type": "object", "required": [[1], "a"]}, {"b": 1})
