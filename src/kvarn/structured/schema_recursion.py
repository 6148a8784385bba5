"""Whether a JSON schema with references can be followed to an end: what needs itself again and again never ends.

The least fixed point over its parts: a part can end when all that it needs can, an alternative when one of them can.
In linear time, because anybody may send a schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvarn.errors import ConstraintError
from kvarn.structured.schema_width import ALTERNATIVES, referred

TABLES = ("properties", "patternProperties", "dependentSchemas")  # keywords with a schema for each name
MAX_MERGED = 200_000  # members of parts that hold together with others: of more, nothing is concluded
LISTS = (*ALTERNATIVES, "prefixItems", "items")
SINGLE = ("additionalProperties", "items", "additionalItems", "contains", "$ref")


def check_recursion(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that nothing of finite length follows, in the whole or in a part."""
    gates = _Gates()
    needs = _Needs(schema, gates)
    parts = list(_reachable(schema))
    for part in parts:
        gates.add(id(part), needs.of(part))
    open_gates = gates.that_cannot_end()
    endless = [part for part in parts if id(part) in open_gates]
    if endless:
        shown = next(part["$ref"] for part in endless if "$ref" in part)
        raise ConstraintError(
            f"the schema cannot be followed to an end: what it refers to as {shown!r:.80} needs itself again; make the "
            "recursion optional: a property that is not required, a list that may be empty, or an alternative in anyOf"
        )


class _Gates:
    """Conditions over each other: one that needs all of several, or one of them."""

    def __init__(self) -> None:
        self._missing: dict[int, int] = {}  # how many are yet to be met
        self._waiting: dict[int, list[int]] = {}  # those that wait for a gate
        self._either: list[object] = []  # keeps the ids of alternatives apart

    def add(self, gate: int, needed: Sequence[int]) -> None:
        self._missing[gate] = len(needed)
        self._wait(gate, needed)

    def either(self, alternatives: Sequence[int]) -> int:
        """A new gate that one of several opens."""
        self._either.append(marker := object())
        self._missing[id(marker)] = 1
        self._wait(id(marker), alternatives)
        return id(marker)

    def that_cannot_end(self) -> set[int]:
        """The gates that nothing opens."""
        ready = [gate for gate, number in self._missing.items() if number == 0]
        closed = {gate for gate, number in self._missing.items() if number > 0}
        while ready:
            for gate in self._waiting.get(ready.pop(), ()):
                self._missing[gate] -= 1
                if self._missing[gate] == 0:
                    closed.discard(gate)
                    ready.append(gate)
        return closed

    def _wait(self, gate: int, needed: Sequence[int]) -> None:
        for one in needed:
            self._waiting.setdefault(one, []).append(gate)


def _reachable(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every part that an answer may come to, once."""
    seen: set[int] = set()
    left: list[object] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            left.extend(_inner(part, schema))


def _inner(part: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[object]:
    for name in TABLES:
        if isinstance(part.get(name), Mapping):
            yield from part[name].values()
    for name in LISTS:
        if isinstance(part.get(name), list | tuple):
            yield from part[name]
    for name in SINGLE:
        yield referred(part[name], root) if name == "$ref" and name in part else part.get(name)


class _Needs:
    """What an instance of a part has in it; only so many members are looked at where several parts hold together."""

    def __init__(self, root: Mapping[str, Any], gates: _Gates) -> None:
        self._root = root
        self._gates = gates
        self._left = MAX_MERGED

    def of(self, part: Mapping[str, Any]) -> list[int]:
        """The gates of all of it."""
        if "const" in part or "enum" in part:
            return []
        needed = [referred(part.get("$ref"), self._root), *_listed(part, "allOf")]
        whole = self._merged(part, [one for one in needed if isinstance(one, Mapping)])
        if whole.get("type") in ("object", ["object"]):
            needed += _required(whole)
        elif whole.get("type") in ("array", ["array"]):
            needed += _least_items(whole)
        gate_ids = [id(one) for one in needed if isinstance(one, Mapping)]
        for name in ("anyOf", "oneOf"):
            alternatives = _listed(part, name)
            if alternatives and all(isinstance(one, Mapping) for one in alternatives):
                gate_ids.append(self._gates.either([id(one) for one in alternatives]))
        return gate_ids

    def _merged(self, part: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """A part with those that hold in addition: what one requires may be a property of another."""
        resolved = [one if (to := referred(one.get("$ref"), self._root)) is None else to for one in others]
        parts = [one for one in (part, *resolved) if isinstance(one, Mapping)]
        self._left -= sum(len(_listed(one, "required")) + len(_properties(one)) for one in parts)
        if len(parts) == 1 or self._left < 0:
            return part
        whole = {name: value for one in parts for name, value in one.items()}
        whole["required"] = [name for one in parts for name in _listed(one, "required")]
        whole["properties"] = {name: value for one in parts for name, value in _properties(one).items()}
        return whole


def _properties(part: Mapping[str, Any]) -> Mapping[str, Any]:
    found = part.get("properties")
    return found if isinstance(found, Mapping) else {}


def _listed(part: Mapping[str, Any], name: str) -> Sequence[object]:
    found = part.get(name)
    return found if isinstance(found, list | tuple) else ()


def _required(part: Mapping[str, Any]) -> Iterator[object]:
    """The schemas of the properties that must be there."""
    known = _properties(part)
    others = None if isinstance(part.get("patternProperties"), Mapping) else part.get("additionalProperties")
    for name in _listed(part, "required"):
        if isinstance(name, str):
            yield known.get(name, others)


def _least_items(part: Mapping[str, Any]) -> Iterator[object]:
    """The schemas of the items that must be there."""
    least, items = part.get("minItems"), part.get("items")
    number = least if isinstance(least, int) else 0
    first = _listed(part, "prefixItems") or (items if isinstance(items, list | tuple) else ())
    yield from first[: max(number, 0)]
    if number > len(first):
        yield part.get("additionalItems") if isinstance(items, list | tuple) else items
