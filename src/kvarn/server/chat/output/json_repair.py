"""JSON that every reader understands alike and that this server accepts: how it is recognised, and how it is repaired.

Refused or repaired: duplicate keys, NaN, numbers beyond the range of a float, halves of surrogate pairs, NUL.
"""

from __future__ import annotations

import math
import re
import sys

from kvarn.formats.strict_json import parse_value, strings

MAX_NUMBER_CHARACTERS = 4300  # more digits than Python reads as an integer, and than a body may have
REPLACEMENT = "\\ufffd"

_LONG_NUMBER = re.compile(rf"[-+.0-9eE]{{{MAX_NUMBER_CHARACTERS + 1}}}")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_ODD_ESCAPE = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")  # a surrogate, or NUL
_ODD_CHARACTER = re.compile("[\x00\ud800-\udfff]")
_LOW_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_STRING_TEXT = re.compile(r'[^"\\]+')
_LITERAL = re.compile(r"[-+.0-9A-Za-z]+")
_BETWEEN = re.compile(r'[^"\-+.0-9A-Za-z]+')


def is_strict_object(text: str) -> bool:
    """Whether text is a JSON object that no reader refuses or understands in another way."""
    try:
        value = parse_value(text, is_finite=True)
    except (ValueError, RecursionError):
        return False
    if _LONG_NUMBER.search(text) and _LONG_NUMBER.search(_STRING.sub("", text)):
        return False
    return isinstance(value, dict) and not (_ODD_ESCAPE.search(text) and _has_odd_text(value))


def _has_odd_text(value: object) -> bool:
    return any(_ODD_CHARACTER.search(text) for text in strings(value))


class JsonRepair:
    """Passes on JSON that a grammar has written, piece by piece; what a grammar cannot forbid is replaced.

    Half of a surrogate pair and NUL become U+FFFD, a number beyond a float the largest one. A number and an escape are
    held back until they are whole.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_in_string = False

    def push(self, text: str) -> str:
        """What is certain with more text."""
        text = self._held + text
        repaired: list[str] = []
        at = 0
        while at < len(text):
            piece, num_read = self._next(text, at)
            if not num_read:
                break
            repaired.append(piece)
            at += num_read
        self._held = text[at:]
        return "".join(repaired)

    def end(self) -> str:
        """What was held back of JSON that was cut off."""
        held, self._held = self._held, ""
        return held

    def _next(self, text: str, at: int) -> tuple[str, int]:
        """One piece as it goes out, and how many characters it took; 0: more text decides."""
        if text[at] == '"':
            self._is_in_string = not self._is_in_string
            return '"', 1
        if self._is_in_string:
            return _escape(text[at : at + 12]) if text[at] == "\\" else _run(_STRING_TEXT, text, at)
        literal, length = _run(_LITERAL, text, at)
        if not length:
            return _run(_BETWEEN, text, at)
        return (_number(literal), length) if at + length < len(text) else ("", 0)


def _run(pattern: re.Pattern[str], text: str, at: int) -> tuple[str, int]:
    found = pattern.match(text, at)
    return (found.group(), len(found.group())) if found else ("", 0)


def _escape(text: str) -> tuple[str, int]:
    """The escape that text begins with."""
    if len(text) < 2 or (text[1] == "u" and len(text) < 6):
        return "", 0
    if text[1] != "u":
        return text[:2], 2
    code, partner = int(text[2:6], 16), text[6:]
    if 0xD800 <= code < 0xDC00:
        if _LOW_HALF.fullmatch(partner):
            return text, 12
        may_be_pair = _LOW_HALF.fullmatch(partner + r"\udc00"[len(partner) :])
        return ("", 0) if may_be_pair else (REPLACEMENT, 6)
    is_odd = code == 0 or 0xDC00 <= code < 0xE000
    return (REPLACEMENT if is_odd else text[:6]), 6


def _number(literal: str) -> str:
    try:
        value = float(literal)
    except ValueError:  # true, false, null
        return literal
    if math.isinf(value):
        return repr(math.copysign(sys.float_info.max, value))
    return literal if len(literal) <= MAX_NUMBER_CHARACTERS else repr(value)
