"""Bodies with enormous lists and objects in every place a schema has: bounded, and refused with few errors.

The places come from the routes' own schemas, so that a new field is tried as soon as it exists.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import ValidationError

from kvarn.errors import RequestError
from kvarn.server.api.schema import BODIES, MAX_FOREIGN, Body, InvalidField
from kvarn.server.api.validation import parse
from kvarn.server.app import ROUTES
from kvarn.server.failures import BadBody
from kvarn.server.http.json_body import _check_shape, _without_strings, parse_body
from tests.conftest import Size

MAX_DEPTH = 6  # of places: messages.0.content.0.text is 4
MAX_ERRORS = 4 * MAX_FOREIGN  # a union has one set of errors for each of its variants
MAX_RATIO = 40  # of the time that json.loads takes; one error for each item takes several hundred
Place = Callable[[Any], Any]  # puts a value into a body
MARK = "the value"

SHAPES: dict[str, Callable[[int], Any]] = {
    "numbers": lambda number: [1] * number,
    "negative numbers": lambda number: [-1] * number,
    "texts": lambda number: ["x"] * number,
    "empty texts": lambda number: [""] * number,
    "objects": lambda number: [{}] * number,
    "text parts": lambda number: [{"type": "text", "text": "x"}] * number,
    "lists": lambda number: [[1]] * number,
    "an object of numbers": lambda number: {f"n{one}": 1 for one in range(number)},
    "an object of texts": lambda number: {str(one): "x" for one in range(number)},
    "an object of objects": lambda number: {str(one): {} for one in range(number)},
}


def bodies() -> dict[str, type[Body]]:
    """The models of all routes' bodies, by name."""
    return {schema["title"]: BODIES[schema["title"]] for _, schema in schemas_of_routes()}


def schemas_of_routes() -> Iterator[tuple[str, dict[str, Any]]]:
    for module in ROUTES:
        for route in module.router.routes:
            if isinstance(route, APIRoute) and "requestBody" in (route.openapi_extra or {}):
                content = (route.openapi_extra or {})["requestBody"]["content"]
                if "application/json" in content:  # a form is taken apart by its route
                    yield route.path, BODIES[content["application/json"]["schema"]["title"]].model_json_schema()


def places(schema: dict[str, Any], definitions: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, Place]]:
    """Every place of a schema where a client may put something, with the path to it."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for variant in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from places(variant, definitions, depth)
    yield "", lambda value: value
    if depth == MAX_DEPTH:
        return
    if schema.get("type") == "array":
        for path, place in places(schema["items"], definitions, depth + 1):
            yield f".0{path}", lambda value, place=place: [place(value)]
    tags = {name: _tag(one) for name, one in schema.get("properties", {}).items() if _tag(one) is not None}
    for name, inner in schema.get("properties", {}).items():
        for path, place in places(inner, definitions, depth + 1):
            yield f".{name}{path}", lambda value, name=name, place=place: {**tags, name: place(value)}


def _tag(schema: dict[str, Any]) -> Any:
    return schema.get("const", (schema.get("enum") or [None])[0])


def cases(schema: dict[str, Any]) -> dict[str, Place]:
    """The places of a body, the body itself included."""
    return dict(places(schema, schema.get("$defs", {})))


def num_errors(model: type[Body], fields: Any) -> int:
    try:
        model.model_validate(fields)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(("path", "schema"), list(schemas_of_routes()), ids=[path for path, _ in schemas_of_routes()])
def test_few_errors_are_made_of_any_number_of_wrong_values(path: str, schema: dict[str, Any]) -> None:
    model = bodies()[schema["title"]]
    tried = cases(schema)
    assert len(tried) > 1
    for name, place in tried.items():
        for shape, make in SHAPES.items():
            assert num_errors(model, place(make(1000))) <= MAX_ERRORS, (path, name, shape)


@pytest.mark.parametrize(("path", "schema"), list(schemas_of_routes()), ids=[path for path, _ in schemas_of_routes()])
def test_every_list_and_every_table_of_a_body_has_a_limit(path: str, schema: dict[str, Any]) -> None:
    """Free JSON, such as a schema, is bounded by the number of values of the whole body."""
    unbounded = [at for at, one in _schemas(schema, "") if _is_unbounded(one)]
    assert not unbounded, f"{path}: give maxItems or maxProperties to {unbounded}"


def _schemas(schema: Any, at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        yield at, schema
        for name, inner in schema.items():
            yield from _schemas(inner, f"{at}/{name}")
    elif isinstance(schema, list):
        for number, inner in enumerate(schema):
            yield from _schemas(inner, f"{at}/{number}")


def _is_unbounded(schema: dict[str, Any]) -> bool:
    if schema.get("type") == "array":
        return "maxItems" not in schema
    is_table = schema.get("type") == "object" and "properties" not in schema
    return is_table and isinstance(schema.get("additionalProperties"), dict) and "maxProperties" not in schema


def test_the_time_to_refuse_a_body_is_that_of_reading_it(size: Size) -> None:
    """For each place and shape, in the time that json.loads takes for the same bytes."""
    number = size(4_000, 480_000)
    values = {shape: json.dumps(make(number)) for shape, make in SHAPES.items()}
    plain_s = {
        shape: min(_seconds(lambda value=value: json.loads(value)) for _ in range(5)) for shape, value in values.items()
    }
    worst = {}
    for title, schema in {schema["title"]: schema for _, schema in schemas_of_routes()}.items():
        for name, place in cases(schema).items():
            if name.count(".") > size(1, MAX_DEPTH):
                continue
            around = json.dumps(place(MARK) if name else {"x": MARK})
            for shape, value in values.items():
                data = around.replace(json.dumps(MARK), value).encode()
                worst[title, name, shape] = _read_s(bodies()[title], data, plain_s[shape]) / plain_s[shape]
    slowest = max(worst, key=lambda case: worst[case])
    assert worst[slowest] < MAX_RATIO, (slowest, worst[slowest])


def _read_s(model: type[Body], data: bytes, plain_s: float) -> float:
    """The best of three: what disturbs a measurement only makes it longer."""

    def read() -> None:
        with suppress(RequestError):
            parse(model, parse_body(data, 64, model.MAX_VALUES))

    best = _seconds(read)
    for _ in range(2):
        best = best if best < plain_s * MAX_RATIO / 4 else min(best, _seconds(read))
    return best


def _seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return max(time.thread_time() - began, 1e-5)


def test_a_body_of_too_many_unknown_fields_says_how_many() -> None:
    chat = bodies()["ChatBody"]
    fields = {f"f{number}": 1 for number in range(MAX_FOREIGN + 1)}
    with pytest.raises(InvalidField, match=f"the body has {MAX_FOREIGN + 1} fields that are not known here") as caught:
        parse(chat, fields)
    assert caught.value.code == "too_many_fields"
    with pytest.raises(InvalidField, match=r"messages.0 has 65 fields"):
        parse(chat, {"model": "m", "messages": [{"role": "user", "content": "x", **fields}]})


def test_too_many_values_and_fields_are_counted_before_they_are_read() -> None:
    with pytest.raises(BadBody, match="480,000 values, at most 65,536 are read"):
        parse_body(b'{"content":[' + b"1," * 479_999 + b"1]}", 64)
    with pytest.raises(BadBody, match="480,000 texts and names"):
        parse_body(b"{" + b",".join(b'"%d":1' % number for number in range(480_000)) + b"}", 64)
    many = b"{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}"
    with pytest.raises(BadBody, match="100,000 fields, at most 65,536 are read"):
        parse_body(many, 64, 200_000)


@pytest.mark.parametrize("number", [b"1" * 199, b"1" * 4300, b"1e2" * 3, b" " * 5000 + b"1"])
def test_long_numbers_and_blank_space_take_linear_time(number: bytes) -> None:
    """A megabyte of them, in the time of a megabyte of text."""
    body = b'{"x":[' + b",".join([number] * (1_000_000 // len(number))) + b"]}"
    text = b'{"x":"' + b"x" * 1_000_000 + b'"}'
    assert min(_shape_s(body) for _ in range(3)) < 30 * max(min(_shape_s(text) for _ in range(3)), 1e-3)


def _shape_s(body: bytes) -> float:
    began = time.thread_time()
    with suppress(BadBody):
        _check_shape(_without_strings(body), 64, 500_000)
    return time.thread_time() - began


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (rb'{"a":"\\","b":",,,,"}', {"a": "\\", "b": ",,,,"}),
        (rb'{"a":"\"[[[[[[\\\"","b":1}', {"a": '"[[[[[[\\"', "b": 1}),
        (rb'{"a":"\\\\\\","b":"::::"}', {"a": "\\\\\\", "b": "::::"}),
    ],
)
def test_what_is_in_strings_does_not_count(body: bytes, value: Any) -> None:
    assert parse_body(body, 1, 3) == value
