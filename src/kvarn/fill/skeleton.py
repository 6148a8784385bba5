"""The skeleton of a JSON schema: braces, names and commas as text, a slot for every value. Knows no tokens.

Plain objects and lists are taken apart; whatever else a schema says of a value is the constraint of its slot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from kvarn.errors import ConstraintError
from kvarn.fill.template import MAX_SLOTS, NamedSlot, Parts, Slot
from kvarn.structured.constraints import JsonSchema

MAX_DEPTH = 16
MAX_SKELETON_CHARACTERS = 1 << 18  # as many as a schema may have
DEFINITIONS = ("$defs", "definitions")
OF_DEFINITIONS = tuple(f"#/{name}/" for name in DEFINITIONS)
JSON_TYPES = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
NOTES = frozenset({"title", "description", "default", "examples", "$schema", "$id", "$comment", *DEFINITIONS})
OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"}) | NOTES
OF_LISTS = frozenset({"type", "items", "minItems", "maxItems"}) | NOTES


def skeleton(schema: Mapping[str, Any] | str, *, num_items: int = 2, value_tokens: int | None = None) -> Parts:
    """The parts of a template whose filling follows the schema; lists get num_items items if they may have so many."""
    root = json.loads(JsonSchema(schema).text)
    writer = _Writer({name: root[name] for name in DEFINITIONS if name in root}, num_items, value_tokens)
    if all(reference.startswith(OF_DEFINITIONS) for reference in _references(root)):
        parts = _merged(_bounded(writer.value(root, "", 0)))
    else:  # a part of the schema would lack what it refers to: the whole is one slot
        parts = (NamedSlot("/", Slot(value_tokens, schema=root)),)
    if not any(isinstance(part, NamedSlot) for part in parts):
        raise ConstraintError("the schema leaves nothing to fill in: every value of it is given")
    return parts


class _Writer:
    """Writes values of one schema."""

    def __init__(self, definitions: Mapping[str, Any], num_items: int, value_tokens: int | None) -> None:
        self._definitions = definitions
        self._num_items = num_items
        self._value_tokens = value_tokens

    def value(
        self, schema: Any, path: str, depth: int, within: frozenset[str] = frozenset()
    ) -> Iterator[str | NamedSlot]:
        """within: the references that lead here; one that comes again is the constraint of a slot."""
        schema, within = self._resolved(schema, within)
        if depth < MAX_DEPTH and _is_plain_object(schema):
            yield from self._object(schema, path, depth, within)
        elif depth < MAX_DEPTH and _is_plain_list(schema):
            yield from self._list(schema, path, depth, within)
        elif set(schema) - NOTES == {"const"} or _is_const_of_its_type(schema):
            yield json.dumps(schema["const"], ensure_ascii=False)
        else:
            yield NamedSlot(path or "/", Slot(self._value_tokens, schema={**self._definitions, **schema}))

    def _object(
        self, schema: Mapping[str, Any], path: str, depth: int, within: frozenset[str]
    ) -> Iterator[str | NamedSlot]:
        yield "{"
        for index, (name, value) in enumerate(schema["properties"].items()):
            yield f"{',' if index else ''}{json.dumps(name, ensure_ascii=False)}:"
            yield from self.value(value, f"{path}/{_escaped(name)}", depth + 1, within)
        yield "}"

    def _list(
        self, schema: Mapping[str, Any], path: str, depth: int, within: frozenset[str]
    ) -> Iterator[str | NamedSlot]:
        least, most = schema.get("minItems", 0), schema.get("maxItems", self._num_items)
        yield "["
        for index in range(max(least, min(self._num_items, most))):
            yield "," if index else ""
            yield from self.value(schema["items"], f"{path}/{index}", depth + 1, within)
        yield "]"

    def _resolved(self, schema: Any, within: frozenset[str]) -> tuple[dict[str, Any], frozenset[str]]:
        """What a reference stands for, where nothing stands beside it, and the references that lead there."""
        if schema is True:
            return {}, within
        while isinstance(schema, dict) and set(schema) - NOTES == {"$ref"}:
            found = self._found(schema["$ref"])
            if found is None or schema["$ref"] in within:
                break
            within |= {schema["$ref"]}
            schema = found
        return (schema if isinstance(schema, dict) else {"not": {}}), within

    def _found(self, reference: object) -> dict[str, Any] | None:
        """The definition that a reference names; None: there is none, or it is no object."""
        kind, _, name = str(reference).removeprefix("#/").partition("/")
        definitions = self._definitions.get(kind)
        found = definitions.get(name) if isinstance(definitions, dict) else None
        return found if isinstance(found, dict) else None


def _escaped(name: str) -> str:
    """A property in the name of a slot, as JSON pointers have it: no two values have one name."""
    return name.replace("~", "~0").replace("/", "~1")


def _references(schema: Any) -> Iterator[str]:
    """Every reference in a schema, wherever it stands."""
    ahead = [schema]
    while ahead:
        at = ahead.pop()
        if isinstance(at, dict):
            if isinstance(at.get("$ref"), str):
                yield at["$ref"]
            ahead += at.values()
        elif isinstance(at, list):
            ahead += at


def _is_const_of_its_type(schema: Mapping[str, Any]) -> bool:
    is_pair = set(schema) - NOTES == {"const", "type"}
    return is_pair and isinstance(schema["type"], str) and JSON_TYPES.get(schema["type"]) is type(schema["const"])


def _bounded(parts: Iterator[str | NamedSlot]) -> Iterator[str | NamedSlot]:
    """The parts as they are written; refused as soon as they are too many, however many would follow."""
    num_slots = num_characters = 0
    for part in parts:
        num_slots += isinstance(part, NamedSlot)
        num_characters += 0 if isinstance(part, NamedSlot) else len(part)
        if num_slots > MAX_SLOTS:
            raise ConstraintError(f"the schema has more than {MAX_SLOTS} values; make it smaller")
        if num_characters > MAX_SKELETON_CHARACTERS:
            raise ConstraintError(
                f"the schema gives more than {MAX_SKELETON_CHARACTERS:,} characters of text; make it smaller"
            )
        yield part


def _is_plain_object(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    is_plain = schema.get("type") == "object" and isinstance(properties, dict) and bool(properties)
    return is_plain and set(schema) <= OF_OBJECTS and isinstance(required, list) and _all_in(required, properties or {})


def _all_in(names: Iterable[Any], properties: Mapping[str, Any]) -> bool:
    return all(isinstance(name, str) and name in properties for name in names)


def _is_plain_list(schema: Mapping[str, Any]) -> bool:
    is_plain = schema.get("type") == "array" and "items" in schema and set(schema) <= OF_LISTS
    # A number written as 3.0, what is no number and bounds that no list meets are left to the constraint of a slot.
    least, most = schema.get("minItems", 0), schema.get("maxItems", 0)
    is_plain = is_plain and type(least) is int and type(most) is int
    return is_plain and least >= 0 and ("maxItems" not in schema or least <= most)


def _merged(parts: Iterator[str | NamedSlot]) -> Parts:
    """Neighbouring texts as one, empty ones left out."""
    merged: list[str | NamedSlot] = []
    for is_slot, neighbours in groupby(parts, lambda part: isinstance(part, NamedSlot)):
        if is_slot:
            merged += neighbours
        elif text := "".join(str(part) for part in neighbours):
            merged.append(text)
    return tuple(merged)
