"""Texts and JSON in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvarn.server.chat.output.formats import OutputFormat

ANY_TEXT = r"/(.|\n)*/"
SPACE = r"[ \t\r\n]{0,32}"  # bounded: a small model may write nothing else


def quoted(text: str) -> str:
    """A text."""
    return json.dumps(text)


def marked(format: OutputFormat, text: str) -> str:
    """A text of which control tokens are named by their id."""
    if not format.marker_ids:
        return quoted(text) if text else ""
    known = dict(format.marker_ids)
    by_length = sorted(known, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, by_length)) + ")", text)
    return " ".join(f"<[{known[piece]}]>" if piece in known else quoted(piece) for piece in pieces if piece)


def text_until(format: OutputFormat, name: str, end: str) -> tuple[str, str]:
    """A rule of this name for any text up to its end, and the expression that stands for both."""
    if _begins_with_token(format, end):
        return f"{name.upper()}: {ANY_TEXT}", f"{name.upper()} {marked(format, end)}"
    return f"{name}[lazy]: {ANY_TEXT} {quoted(end)}", name


def _begins_with_token(format: OutputFormat, text: str) -> bool:
    return any(text.startswith(marker) for marker, _ in format.marker_ids)


def json_value(schema: Mapping[str, Any], guidance: Mapping[str, Any]) -> str:
    """JSON that follows a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': guidance})}"
