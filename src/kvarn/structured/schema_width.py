"""How many properties a JSON schema leaves open at one place: the parser of constraints holds so many and no more.

After `{` every property up to the next required one may follow, in each of the alternatives. Counted before anything is
compiled, which takes seconds for a schema whose first token would be its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvarn.errors import ConstraintError

MAX_OPEN = 490  # llguidance keeps four items for each, and 2,000 in a row
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords with data, not schemas


def check_width(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that could be compiled, and not be followed."""
    widths: dict[int, int] = {}
    try:
        number = max((_num_open(part, schema, widths) for part in _parts(schema)), default=0)
    except RecursionError:
        return  # a long chain of references: whoever compiles it says whether it is too deep
    if number > MAX_OPEN:
        raise ConstraintError(
            f"the schema has {number:,} properties of which any may come next, at most {MAX_OPEN} are allowed; "
            "make some of them required, or put them into objects of their own"
        )


def _parts(schema: object) -> Iterator[Mapping[str, Any]]:
    """All objects in a schema, itself included; properties by the name of a keyword do no harm."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield part
            left.extend(value for name, value in part.items() if name not in VALUES)
        elif isinstance(part, list | tuple):
            left.extend(part)


def _num_open(part: object, root: Mapping[str, Any], widths: dict[int, int]) -> int:
    """Properties that may come next somewhere in an object of this schema; widths: those found so far."""
    if not isinstance(part, Mapping):
        return 0
    if id(part) not in widths:
        widths[id(part)] = 0  # a reference to itself adds nothing
        inner = [one for name in ALTERNATIVES if isinstance(part.get(name), list | tuple) for one in part[name]]
        inner.append(referred(part.get("$ref"), root))
        widths[id(part)] = _longest_run(part) + sum(_num_open(one, root, widths) for one in inner)
    return widths[id(part)]


def _longest_run(part: Mapping[str, Any]) -> int:
    """The most properties in a row that are not required."""
    properties, required = part.get("properties"), part.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list | tuple) else set()
    longest = run = 0
    for name in properties if isinstance(properties, Mapping) else ():
        run = 0 if name in names else run + 1
        longest = max(longest, run)
    return longest


def referred(reference: object, root: Mapping[str, Any]) -> object:
    """What a reference within the schema means; None for all others."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for step in filter(None, reference[1:].split("/")):
        if isinstance(found, list | tuple):
            found = found[int(step)] if step.isdecimal() and len(step) < 7 and int(step) < len(found) else None
        else:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
