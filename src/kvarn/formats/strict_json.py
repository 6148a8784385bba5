"""JSON from untrusted sources, strictly: bounded in size, without duplicate keys, NaN or deep nesting."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from kvarn.errors import FormatError
from kvarn.formats.mapped_file import MappedFile

MAX_JSON_BYTES = 4 << 20  # a header of 30,000 tensors
MAX_CONTAINERS = 100_000  # lists and objects: Python needs up to 200 bytes for two of the file
MAX_DEPTH = 64  # of lists and objects in each other; configurations have six
MAX_DIGITS = 300  # a float holds 308; "no limit" is written as a 1 and 30 zeros in most tokenizer_config.json


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """How much of a file is parsed."""

    num_bytes: int = MAX_JSON_BYTES
    num_values: int = 1_000_000
    num_containers: int = MAX_CONTAINERS


USUAL_LIMITS = JsonLimits()


def parse_object(data: bytes, file: str, limits: JsonLimits = USUAL_LIMITS) -> dict[str, Any]:
    """Parse a JSON object or raise FormatError."""
    value = _parse_bounded(data, file, limits)
    if not isinstance(value, dict):
        raise FormatError(f"the JSON is a {type(value).__name__}, not an object", file=file)
    return value


def _parse_bounded(data: bytes, file: str, limits: JsonLimits) -> Any:
    _check_size(len(data), file, limits)
    if data.count(b"{") + data.count(b"[") > limits.num_containers:
        raise FormatError(f"the JSON has more than {limits.num_containers:,} lists and objects", file=file)
    if data.count(b",") > limits.num_values:
        raise FormatError(f"the JSON has more than {limits.num_values:,} values", file=file)
    try:
        value = _parse(data.decode("utf-8"), parse_float=_finite, parse_int=_bounded)
        is_deep = _is_deeper(value, MAX_DEPTH)
    except RecursionError:
        is_deep = True
    except ValueError as error:  # also UnicodeDecodeError and JSONDecodeError
        raise FormatError(f"this is not JSON: {error}", file=file) from error
    if is_deep:
        raise FormatError(f"the JSON is nested too deeply; at most {MAX_DEPTH} levels are allowed", file=file)
    return value


def parse_value(text: str, *, is_finite: bool = False) -> Any:
    """Parse any JSON or raise ValueError; is_finite also refuses numbers too large for a float (it costs time)."""
    return _parse(text, parse_float=_finite if is_finite else None)


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


def read_object(path: str | os.PathLike[str], limits: JsonLimits = USUAL_LIMITS) -> dict[str, Any]:
    """Parse a whole file; only a regular one is read."""
    name = os.fspath(path)
    return parse_object(read_bytes(name, limits.num_bytes), name, limits)


def read_optional(path: str | os.PathLike[str], limits: JsonLimits = USUAL_LIMITS) -> dict[str, Any]:
    """Parse a file that may be missing; then the object is empty."""
    return read_object(path, limits) if os.path.lexists(path) else {}


def read_optional_list(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Parse a file with a list of objects that may be missing; then the list is empty."""
    if not os.path.lexists(path):
        return []
    name = os.fspath(path)
    value = _parse_bounded(read_bytes(name, USUAL_LIMITS.num_bytes), name, USUAL_LIMITS)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise FormatError("the JSON is not a list of objects", file=name)
    return value


def read_bytes(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The bytes of a regular file, or FormatError."""
    file = MappedFile(path)
    try:
        _check_size(file.size, file.path, JsonLimits(max_bytes))
        return file.buffer[:]
    finally:
        file.close()


def _check_size(num_bytes: int, file: str, limits: JsonLimits) -> None:
    if num_bytes > limits.num_bytes:
        raise FormatError(f"the file has {num_bytes:,} bytes; at most {limits.num_bytes:,} are allowed", file=file)


def _is_deeper(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [item for part in level for item in _items(part)]
        if not level:
            return False
    return True


def _items(value: object) -> Iterable[object]:
    """The lists and objects in a list or an object."""
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return [item for item in inner if isinstance(item, list | dict)]


def _parse(text: str, **hooks: Any) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse, **hooks)


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


def _bounded(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"the number {digits:.40} is too large")
    return int(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
