"""Logs as JSON, one object per line on stderr. Prompts, answers and API keys are never logged: see RequestLine.

{"time": "2026-05-01T12:00:00.123Z", "level": "info", "logger": "kvarn.access", "message": "request", ...}
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

FIELDS = "kvarn_fields"  # attribute of a LogRecord: more members of its object
MAX_TEXT = 4000  # of a message; tracebacks have their own bound
MAX_TRACE = 16_000
access_log = logging.getLogger("kvarn.access")


@dataclass(frozen=True, slots=True)
class RequestLine:
    """What is logged about one request: numbers, ids and names. There is no field for its texts."""

    request_id: str
    method: str
    path: str
    status: int
    duration_s: float
    first_byte_s: float | None = None
    model: str | None = None
    key: str | None = None  # the key's name or shown prefix; never the key
    tier: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error_code: str | None = None  # of the body, where the request was refused or failed
    error_field: str | None = None  # the first part of `param`: a name of ours, never one that only the client knows
    client: str | None = None

    def fields(self) -> dict[str, object]:
        """The members of the line; unknown ones are left out."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: _rounded(value) for name, value in values.items() if value is not None}


class JsonFormatter(logging.Formatter):
    """A LogRecord as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record)[:MAX_TEXT],
        }
        fields: Mapping[str, object] = getattr(record, FIELDS, {})
        line.update(fields)
        if record.exc_info:
            line["error"] = _error_type(record)
            line["trace"] = self.formatException(record.exc_info)[-MAX_TRACE:]
        return json.dumps(line, ensure_ascii=True, default=repr)


def configure_logging(level: str, stream: IO[str] | None = None) -> None:
    """Send everything Kvarn and uvicorn log to stderr as JSON; replaces what was there before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("kvarn", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        # uvicorn's info lines repeat ours.
        logger.setLevel(level.upper() if name == "kvarn" else "WARNING")


def log_request(line: RequestLine) -> None:
    """Log one line after the last byte of a response was sent."""
    level = logging.WARNING if line.status >= 500 else logging.INFO
    access_log.log(level, "request", extra={FIELDS: line.fields()})


def with_fields(**fields: object) -> dict[str, object]:
    """`log.info("draining", extra=with_fields(delay_s=5))`."""
    return {FIELDS: fields}


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a wrong format string must not lose the line
        return str(record.msg)


def _error_type(record: logging.LogRecord) -> str:
    kind = record.exc_info[0] if record.exc_info else None
    return "" if kind is None else kind.__name__


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value
