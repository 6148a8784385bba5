"""Values as Python writes them, and as Gemma does: read while they are being written.

python   name='text', days=3, tags=["x"], is_new=True
gemma    name:<|"|>text<|"|>,days:3,tags:[<|"|>x<|"|>],is_new:true
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvarn.formats.strict_json import parse_value
from kvarn.server.chat.output.call_forms.call_scan import MAX_DEPTH
from kvarn.server.chat.output.call_forms.cursor import WORD_CHARACTERS, Impossible, Reading, TextCursor
from kvarn.server.chat.output.call_forms.form import GEMMA_QUOTE

_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_SIMPLE_ESCAPES = {
    **{"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"},
    **{"\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""},
}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_LITERAL_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.")


@dataclass(frozen=True, slots=True)
class LiteralStyle:
    """What stands around keys and strings."""

    separator: str  # between the name of an argument and its value
    quotes: str  # characters that begin a string with escapes
    raw_quote: str = ""  # begins and ends a string without any
    has_bare_keys: bool = False  # in objects


PYTHON = LiteralStyle("=", "'\"")
GEMMA = LiteralStyle(":", '"', GEMMA_QUOTE, has_bare_keys=True)


def read_members(cursor: TextCursor, style: LiteralStyle, close: str) -> Reading[dict[str, Any]]:
    """The arguments of a call up to what closes them, which is read too."""
    members: dict[str, Any] = {}
    while True:
        yield from cursor.space()
        if (yield from cursor.peek()) == close:
            cursor.at += 1
            return members
        key = yield from _key(cursor, style)
        if key in members:
            raise Impossible
        yield from cursor.literal(style.separator)
        members[key] = yield from read_value(cursor, style)
        if (yield from _has_ended(cursor, close)):
            return members


def read_value(cursor: TextCursor, style: LiteralStyle, depth: int = 0) -> Reading[Any]:
    """One value."""
    yield from cursor.space()
    character = yield from cursor.peek()
    if character in style.quotes or (style.raw_quote and character == style.raw_quote[0]):
        return (yield from _string(cursor, style))
    if character in "[{":
        if depth >= MAX_DEPTH:
            raise Impossible
        cursor.at += 1
        inside = _list if character == "[" else _object
        return (yield from inside(cursor, style, depth + 1))
    word = yield from cursor.run(_LITERAL_CHARACTERS.__contains__)
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _NUMBER.fullmatch(word) is None:
        raise Impossible
    try:
        return parse_value(word, is_finite=True)
    except ValueError:
        raise Impossible from None


def _list(cursor: TextCursor, style: LiteralStyle, depth: int) -> Reading[list[Any]]:
    items: list[Any] = []
    while True:
        yield from cursor.space()
        if (yield from cursor.peek()) == "]":
            cursor.at += 1
            return items
        items.append((yield from read_value(cursor, style, depth)))
        if (yield from _has_ended(cursor, "]")):
            return items


def _object(cursor: TextCursor, style: LiteralStyle, depth: int) -> Reading[dict[str, Any]]:
    members: dict[str, Any] = {}
    while True:
        yield from cursor.space()
        if (yield from cursor.peek()) == "}":
            cursor.at += 1
            return members
        key = yield from (_key(cursor, style) if style.has_bare_keys else _string(cursor, style))
        if key in members:
            raise Impossible
        yield from cursor.literal(":")
        members[key] = yield from read_value(cursor, style, depth)
        if (yield from _has_ended(cursor, "}")):
            return members


def _has_ended(cursor: TextCursor, close: str) -> Reading[bool]:
    """After a value: a comma, or the end."""
    return (yield from cursor.one_of((",", close))) == 1


def _key(cursor: TextCursor, style: LiteralStyle) -> Reading[str]:
    character = yield from cursor.peek()
    if style.has_bare_keys and (character in style.quotes or character == style.raw_quote[:1]):
        return (yield from _string(cursor, style))
    key = yield from cursor.run(_is_bare if style.has_bare_keys else _is_identifier)
    if not key:
        raise Impossible
    return key


def _is_bare(character: str) -> bool:
    return character not in ":,{}[]\n"


def _is_identifier(character: str) -> bool:
    return character in WORD_CHARACTERS or character.isidentifier()


def _string(cursor: TextCursor, style: LiteralStyle) -> Reading[str]:
    quote = yield from cursor.peek()
    if quote not in style.quotes:
        yield from cursor.literal(style.raw_quote or style.quotes[0])
        return (yield from cursor.until(style.raw_quote))
    cursor.at += 1
    parts: list[str] = []
    while True:
        parts.append((yield from cursor.run(lambda character: character not in (quote, "\\"))))
        cursor.at += 1
        if cursor.text[cursor.at - 1] == quote:
            return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        parts.append((yield from _escape(cursor)))


def _escape(cursor: TextCursor) -> Reading[str]:
    kind = yield from cursor.peek()
    if kind in _SIMPLE_ESCAPES:
        cursor.at += 1
        return _SIMPLE_ESCAPES[kind]
    if kind not in _HEX_ESCAPES:
        return "\\"  # as Python has it: of an unknown escape both characters stay
    cursor.at += 1
    digits = ""
    while len(digits) < _HEX_ESCAPES[kind]:
        digits += yield from cursor.peek()
        if digits[-1] not in "0123456789abcdefABCDEF":
            raise Impossible
        cursor.at += 1
    code = int(digits, 16)
    if code > 0x10FFFF:
        raise Impossible
    return chr(code)
