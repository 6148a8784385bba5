"""Conditions and values in Milvus's filter language. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvarn.retrieval.filters import AllOf, AnyOf, Compare, Condition, Exists, Not

COMPARISONS = {"eq": "==", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def to_expression(condition: Condition) -> str:
    """A condition as a filter expression; a missing field makes a comparison false, not unknown."""
    match condition:
        case Compare(field, operator, value):
            compared = f"{_field(field)} {COMPARISONS[operator]} {quoted(value)}"
            return f"({compared})" if field in ("id", "source") else f"(exists {_field(field)} and {compared})"
        case Exists(field):
            return "(key >= 0)" if field in ("id", "source") else f"(exists {_field(field)})"
        case Not(inner):
            return f"(not {to_expression(inner)})"
        case AllOf(conditions):
            return "(" + " and ".join(map(to_expression, conditions)) + ")"
        case AnyOf(conditions):
            return "(" + " or ".join(map(to_expression, conditions)) + ")"


def _field(name: str) -> str:
    return {"id": "document", "source": "source"}.get(name) or f"metadata[{quoted(name)}]"


def quoted(value: object) -> str:
    """A value as a literal."""
    return json.dumps(value, ensure_ascii=False)


def listed(values: Sequence[str]) -> str:
    """Values as a list of literals."""
    return "[" + ", ".join(map(quoted, values)) + "]"
