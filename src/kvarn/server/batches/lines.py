"""The lines of a batch file: OpenAI's format, one request each. A line that is none is told with its number.

Knows JSON and the four fields of a line; what a body means is known to the endpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import IO, Any

from kvarn.errors import shortened
from kvarn.server.failures import BadBody
from kvarn.server.http.json_body import parse_body, write_json

FIELDS = ("custom_id", "method", "url", "body")
MAX_CUSTOM_ID = 512  # characters
MAX_SHOWN = 80  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch."""

    number: int  # of the line, from 1
    custom_id: str
    url: str
    body: bytes  # JSON


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that is no request, and why."""

    number: int
    custom_id: str | None
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class LineRules:
    """What a line may be: where its request may go, and how long and deep it may be."""

    urls: Collection[str]
    max_line_bytes: int
    max_json_depth: int


def read_lines(file: IO[bytes], rules: LineRules) -> Iterator[BatchLine | BrokenLine]:
    """All lines in order, without empty ones; of two with one custom_id the second is broken."""
    seen: set[str] = set()
    number = 0
    while data := file.readline(rules.max_line_bytes + 1):
        number += 1
        if len(data) > rules.max_line_bytes and not data.endswith(b"\n"):
            _skip_line(file)
            words = f"it has more than {rules.max_line_bytes:,} bytes; make it shorter"
            yield BrokenLine(number, None, "line_too_long", f"line {number}: {words}")
            continue
        if not data.strip():
            continue
        line = parse_line(data, number, rules)
        if isinstance(line, BatchLine) and line.custom_id in seen:
            words = f"custom_id {_shown(line.custom_id)} was used before; give each line its own"
            line = BrokenLine(number, line.custom_id, "duplicate_custom_id", f"line {number}: {words}")
        if isinstance(line, BatchLine):
            seen.add(line.custom_id)
        yield line


def parse_line(data: bytes, number: int, rules: LineRules) -> BatchLine | BrokenLine:
    """One line of a file."""
    try:
        fields = parse_body(data.strip(), rules.max_json_depth)
    except BadBody as error:
        message = str(error).replace("the body", "it", 1)
        return BrokenLine(number, None, "invalid_json_line", f"line {number}: {message}")
    custom_id = fields.get("custom_id")
    known_id = custom_id if isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID else None
    wrong = _wrong(fields, known_id, rules)
    if known_id is None or wrong is not None:
        assert wrong is not None
        return BrokenLine(number, known_id, *wrong[:1], f"line {number}: {wrong[1]}")
    return BatchLine(number, known_id, fields["url"], write_json(fields["body"]))


def _wrong(fields: dict[str, Any], custom_id: str | None, rules: LineRules) -> tuple[str, str] | None:
    """Code and words of the first thing that is wrong with a line."""
    if missing := [name for name in FIELDS if name not in fields]:
        return "missing_required_parameter", f"{missing[0]} is missing; a line has {', '.join(FIELDS)}"
    if unknown := sorted(set(fields) - set(FIELDS)):
        return "unknown_parameter", f"it has the field {_shown(unknown[0])}; a line has {', '.join(FIELDS)}"
    if custom_id is None:
        return "invalid_custom_id", f"custom_id is no text of 1 to {MAX_CUSTOM_ID} characters"
    if fields["method"] != "POST":
        return "invalid_method", f"method is {_shown(fields['method'])}; only POST is answered in a batch"
    if fields["url"] not in tuple(rules.urls):
        return "invalid_url", f"url is {_shown(fields['url'])}; give {' or '.join(sorted(rules.urls))}"
    if not isinstance(fields["body"], dict):
        return "invalid_body", "body is no JSON object"
    if fields["body"].get("stream"):
        return "unsupported_parameter", "body.stream is true, and a batch streams nothing; leave it out"
    return None


def _shown(value: object) -> str:
    return shortened(repr(value), MAX_SHOWN, MAX_SHOWN // 4)


def _skip_line(file: IO[bytes]) -> None:
    while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass
