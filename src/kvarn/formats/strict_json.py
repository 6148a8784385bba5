"""JSON from untrusted sources, strictly: bounded in size, without duplicate keys, NaN or deep nesting."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

from kvarn.errors import FormatError
from kvarn.formats.mapped_file import MappedFile

MAX_JSON_BYTES = 4 << 20  # a header of 30,000 tensors
MAX_CONTAINERS = 100_000  # lists and objects: Python needs up to 200 bytes for two of the file


def parse_object(data: bytes, file: str) -> dict[str, Any]:
    """Parse a JSON object or raise FormatError."""
    if len(data) > MAX_JSON_BYTES:
        raise FormatError(f"{len(data):,} bytes of JSON; at most {MAX_JSON_BYTES:,} are allowed", file=file)
    if data.count(b"{") + data.count(b"[") > MAX_CONTAINERS:
        raise FormatError(f"the JSON has more than {MAX_CONTAINERS:,} lists and objects", file=file)
    try:
        value = parse_value(data.decode("utf-8"))
    except RecursionError:
        raise FormatError("the JSON is nested too deeply", file=file) from None
    except ValueError as error:  # also UnicodeDecodeError and JSONDecodeError
        raise FormatError(f"this is not JSON: {error}", file=file) from error
    if not isinstance(value, dict):
        raise FormatError(f"the JSON is a {type(value).__name__}, not an object", file=file)
    return value


def parse_value(text: str, *, is_finite: bool = False) -> Any:
    """Parse any JSON or raise ValueError; is_finite also refuses numbers too large for a float (it costs time)."""
    parse_float = _finite if is_finite else None
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse, parse_float=parse_float)


def strings(value: object) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())


def read_object(path: str) -> dict[str, Any]:
    """Parse a whole file."""
    file = MappedFile(path)
    try:
        if file.size > MAX_JSON_BYTES:
            raise FormatError(f"{file.size:,} bytes of JSON; at most {MAX_JSON_BYTES:,} are allowed", file=path)
        return parse_object(file.buffer[:], path)
    finally:
        file.close()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice")
    return result


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits:.40} is too large")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
