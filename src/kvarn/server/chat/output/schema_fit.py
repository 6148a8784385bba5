"""Whether arguments fit the JSON schema of a tool, for calls that no grammar has written. Pure; bounded in work.

Checks what tools use: types, members, items, enumerations, ranges, lengths, combinations and references within the
schema. Keywords that need a regular expression (pattern, format, patternProperties) and those it does not know
are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_CHECKS = 20_000  # of values against schemas, for one call: what takes more does not fit
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def fits(schema: object, value: object, *, root: object = None) -> bool:
    """Whether a parsed JSON value follows a schema, as far as it is checked; root: of which the schema is a part."""
    try:
        return _Checker(schema if root is None else root).fits(schema, value)
    except (_TooMuch, RecursionError):
        return False


class _TooMuch(Exception):
    """The limit of checks was reached."""


class _Checker:
    def __init__(self, root: object) -> None:
        self._root = root
        self._num_left = MAX_CHECKS
        self._targets: dict[str, object] = {}  # of references, each followed once

    def fits(self, schema: object, value: object) -> bool:
        self._spend(1)
        if not isinstance(schema, Mapping):
            return schema is not False
        self._spend(sum(len(_listed(schema.get(name))) for name in ("type", "enum", "required")))
        return (
            _has_type(schema, value)
            and _is_listed(schema, value)
            and _is_in_range(schema, value)
            and self._fits_others(schema, value)
            and (not isinstance(value, dict) or self._fits_members(schema, value))
            and (not isinstance(value, list) or self._fits_items(schema, value))
        )

    def _spend(self, num_checks: int) -> None:
        self._num_left -= num_checks
        if self._num_left < 0:
            raise _TooMuch

    def _fits_others(self, schema: Mapping[str, Any], value: object) -> bool:
        """$ref and the combinations of schemas."""
        if "$ref" in schema and not self.fits(self._target(schema["$ref"]), value):
            return False
        for name, wanted in (("allOf", all), ("anyOf", any)):
            if name in schema and not wanted(self.fits(one, value) for one in _listed(schema[name])):
                return False
        if "oneOf" in schema and sum(self.fits(one, value) for one in _listed(schema["oneOf"])) != 1:
            return False
        return "not" not in schema or not self.fits(schema["not"], value)

    def _target(self, reference: object) -> object:
        """The schema that a reference within this one points at; anything else is not checked."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        if reference not in self._targets:
            self._targets[reference] = self._follow(reference)
        return self._targets[reference]

    def _follow(self, reference: str) -> object:
        target = self._root
        for step in reference[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or key not in target:
                return True
            target = target[key]
        return target

    def _fits_members(self, schema: Mapping[str, Any], value: dict[str, Any]) -> bool:
        properties = schema.get("properties")
        declared = properties if isinstance(properties, Mapping) else {}
        if any(isinstance(name, str) and name not in value for name in _listed(schema.get("required"))):
            return False
        if not _is_within(len(value), schema, "minProperties", "maxProperties"):
            return False
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self.fits(declared.get(name, others), member) for name, member in value.items())

    def _fits_items(self, schema: Mapping[str, Any], value: list[Any]) -> bool:
        if not _is_within(len(value), schema, "minItems", "maxItems"):
            return False
        first = _listed(schema.get("prefixItems"))
        others = schema.get("items", True)
        return all(self.fits(first[i] if i < len(first) else others, item) for i, item in enumerate(value))


def _has_type(schema: Mapping[str, Any], value: object) -> bool:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else _listed(wanted)
    return not names or any(_is_of_type(name, value) for name in names)


def _is_of_type(name: object, value: object) -> bool:
    if not isinstance(name, str) or name not in _TYPES:
        return True
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _is_listed(schema: Mapping[str, Any], value: object) -> bool:
    if "const" in schema and not _is_same(schema["const"], value):
        return False
    return "enum" not in schema or any(_is_same(one, value) for one in _listed(schema["enum"]))


def _is_same(one: object, other: object) -> bool:
    """Equal in JSON, where true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_in_range(schema: Mapping[str, Any], value: object) -> bool:
    if isinstance(value, str):
        return _is_within(len(value), schema, "minLength", "maxLength")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    low, high = _number(schema.get("exclusiveMinimum")), _number(schema.get("exclusiveMaximum"))
    is_beyond = (low is not None and value <= low) or (high is not None and value >= high)
    return not is_beyond and _is_within(value, schema, "minimum", "maximum")


def _is_within(value: float, schema: Mapping[str, Any], low: str, high: str) -> bool:
    least, most = _number(schema.get(low)), _number(schema.get(high))
    return (least is None or value >= least) and (most is None or value <= most)


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
