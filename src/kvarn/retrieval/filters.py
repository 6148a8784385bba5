"""Filters on metadata: parsed once into conditions, compiled to SQL here and to Milvus expressions in milvus/.

    {"lang": "en"}                          equal; "id" and "source" are fields of the document itself
    {"lang": ["en", "sv"]}                  one of
    {"year": {"gte": 2020, "lt": 2024}}     eq ne gt gte lt lte in exists
    {"$or": [{...}, {...}]}                 also $and, and $not with one condition

A comparison with a field that is missing or of another type is false; `ne` is the complement of `eq`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvarn.checks import short
from kvarn.errors import InvalidParameter
from kvarn.retrieval.types import Scalar, is_metadata_name

Operator = Literal["eq", "gt", "gte", "lt", "lte"]
COMPARISONS: dict[str, str] = {"eq": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
OPERATORS = (*COMPARISONS, "ne", "in", "exists")
MAX_DEPTH = 16
MAX_CONDITIONS = 1024
GROUP = 16  # conditions in one chain of SQL


@dataclass(frozen=True, slots=True)
class Compare:
    field: str
    operator: str  # of COMPARISONS
    value: Scalar


@dataclass(frozen=True, slots=True)
class Exists:
    field: str


@dataclass(frozen=True, slots=True)
class AllOf:
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Not:
    condition: Condition


Condition = Compare | Exists | AllOf | AnyOf | Not


def parse_filter(given: object) -> Condition | None:
    """A filter as a condition; None, which matches everything, for None and {}."""
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    condition = _parse(given, 0)
    if _count(condition) > MAX_CONDITIONS:
        raise InvalidParameter(f"the filter has more than {MAX_CONDITIONS:,} conditions; simplify it", field="filter")
    return condition


def to_sql(condition: Condition) -> tuple[str, list[Any]]:
    """A WHERE expression over documents(id, source, metadata), always 0 or 1, and its parameters."""
    match condition:
        case Compare(field, operator, value):
            column, arguments = _column(field)
            types = "'text'" if isinstance(value, str) else "'integer', 'real'"
            kind, more = _type_of(field)
            compared = f"coalesce({kind} IN ({types}) AND {column} {COMPARISONS[operator]} ?, 0)"
            return compared, [*more, *arguments, value]
        case Exists(field):
            column, arguments = _column(field)
            return f"({column} IS NOT NULL)", arguments
        case Not(inner):
            sql, arguments = to_sql(inner)
            return f"(NOT {sql})", arguments
        case AllOf(conditions) | AnyOf(conditions):
            word = " AND " if isinstance(condition, AllOf) else " OR "
            return _joined([to_sql(one) for one in conditions], word)


def _joined(parts: Sequence[tuple[str, list[Any]]], word: str) -> tuple[str, list[Any]]:
    """Expressions as one. SQLite refuses chains of 1,000, hence the groups, and keeps 100 symbols that are not
    understood yet: what comes first in parentheses adds one of them, all else three, and the longest comes first."""
    ordered = sorted(parts, key=lambda part: -len(part[0]))
    if len(ordered) > GROUP:
        groups = [ordered[start : start + GROUP] for start in range(0, len(ordered), GROUP)]
        ordered = [_joined(group, word) for group in groups]
    return f"({word.join(sql for sql, _ in ordered)})", [argument for _, more in ordered for argument in more]


def _column(field: str) -> tuple[str, list[Any]]:
    if field in ("id", "source"):
        return field, []
    return "json_extract(metadata, ?)", [_path(field)]


def _type_of(field: str) -> tuple[str, list[Any]]:
    column, arguments = _column(field)
    return f"typeof({column})", arguments


def _path(field: str) -> str:
    return '$."' + field + '"'


def _parse(given: object, depth: int) -> Condition:
    if depth > MAX_DEPTH:
        raise InvalidParameter(f"the filter is nested more than {MAX_DEPTH} deep; simplify it", field="filter")
    if not isinstance(given, Mapping) or not given:
        raise InvalidParameter(
            f"a filter is {short(given)}; give a mapping of fields to values or conditions", field="filter"
        )
    return _all([_parse_field(name, value, depth) for name, value in given.items()])


def _parse_field(name: object, value: object, depth: int) -> Condition:
    if name in ("$and", "$or"):
        parts = tuple(_parse(one, depth + 1) for one in _require_list(name, value))
        return AllOf(parts) if name == "$and" else AnyOf(parts)
    if name == "$not":
        return Not(_parse(value, depth + 1))
    if not isinstance(name, str) or not is_metadata_name(name):
        raise InvalidParameter(
            f"a filter names the field {short(name)}; use a metadata name, $and, $or or $not", field="filter"
        )
    if isinstance(value, Mapping) and value:
        return _all([_parse_operator(name, operator, operand) for operator, operand in value.items()])
    return _parse_operator(name, "in" if isinstance(value, list | tuple) else "eq", value)


def _parse_operator(field: str, operator: object, operand: object) -> Condition:
    if operator == "in":
        return AnyOf(tuple(Compare(field, "eq", _scalar(field, one)) for one in _require_list(field, operand)))
    if operator == "ne":
        return Not(Compare(field, "eq", _scalar(field, operand)))
    if operator == "exists":
        return Exists(field) if operand else Not(Exists(field))
    if operator in COMPARISONS:
        return Compare(field, str(operator), _scalar(field, operand))
    raise InvalidParameter(
        f"the filter on {short(field)} uses {short(operator)}; choose one of {', '.join(OPERATORS)}", field="filter"
    )


def _all(conditions: Sequence[Condition]) -> Condition:
    return conditions[0] if len(conditions) == 1 else AllOf(tuple(conditions))


def _require_list(name: object, value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidParameter(
            f"the filter's {short(name)} is {short(value)}; give a list that is not empty", field="filter"
        )
    return value


def _scalar(field: str, value: object) -> Scalar:
    is_scalar = isinstance(value, str | int | float) and not (isinstance(value, float) and not math.isfinite(value))
    if not is_scalar or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        raise InvalidParameter(
            f"the filter compares {short(field)} with {short(value)}; give a text, number or boolean", field="filter"
        )
    return value  # type: ignore[return-value]


def _count(condition: Condition) -> int:
    match condition:
        case AllOf(parts) | AnyOf(parts):
            return sum(map(_count, parts))
        case Not(inner):
            return _count(inner)
        case _:
            return 1
