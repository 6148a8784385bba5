"""Read the JSON of tool calls character by character: {"name": ..., "arguments": {...}}, or a list of those.

Stops at the first character that makes it impossible, so that other text is not held back longer than needed. Knows
positions in one growing text; knows no markers and no stream.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from kvarn.server.chat.output.json_repair import is_strict_object

MAX_DEPTH = 64
WHITESPACE = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "tool_name")
STRING_KEYS = (*NAME_KEYS, "type", "id", "tool_call_id")

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERAL = re.compile(r"[-+.0-9A-Za-z]+")
_CLOSING = {"{": "}", "[": "]"}


class Status(Enum):
    """Whether a piece of text is what it might be."""

    OPEN = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(slots=True)
class CallText:
    """One call as far as it has been read; its arguments are text[start:end], or converted."""

    name: str | None = None
    opened_at: int | None = None  # right after the { of {"name": ...}
    named_at: int | None = None  # right after its name
    start: int | None = None
    end: int | None = None
    converted: str | None = None  # arguments that were not written as JSON

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments have begun."""
        return self.start is not None or self.converted is not None

    @property
    def has_whole_arguments(self) -> bool:
        """Whether the arguments have ended; those that are converted are told by their reader."""
        return self.end is not None or self.converted is not None

    def arguments(self, text: str, at: int, num_known: int = 0) -> str:
        """The arguments as JSON, as far as text was read, without the first characters of them."""
        if self.converted is not None:
            return self.converted[num_known:]
        assert self.start is not None
        return text[self.start + num_known : at if self.end is None else self.end]


class _Expect(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # a value or ]
    FIRST_KEY = auto()  # a key or }
    KEY = auto()
    COLON = auto()
    AFTER = auto()  # a comma or the end of what is open
    IN_KEY = auto()
    IN_STRING = auto()
    IN_LITERAL = auto()


class CallScan:
    """Feed the growing text; at is the first character not consumed."""

    def __init__(
        self,
        names: Collection[str],
        at: int,
        calls: list[CallText],
        *,
        name: str | None = None,
        is_trusted: bool = False,
    ) -> None:
        """calls: to which those that are read are added. name: what follows is the arguments of this call, not a call.

        is_trusted: a grammar wrote the JSON.
        """
        self.status = Status.OPEN
        self.at = at
        self.calls = calls
        self._num_before = len(calls)
        self._names = names
        self._is_trusted = is_trusted
        self._is_arguments_only = name is not None
        if name is not None:
            self.calls.append(CallText(name))
        self._expect = _Expect.VALUE
        self._stack: list[str] = []
        self._keys: set[str] = set()  # of the call being read
        self._key = ""
        self._string_at = 0
        self._escape = 0  # characters of an escape still to come: 1 after a backslash, then up to 4 of \uXXXX
        self._is_hex = False

    @property
    def is_list(self) -> bool:
        """Whether the calls stand in a list."""
        return self._stack[:1] == ["["]

    def feed(self, text: str) -> None:
        """Go on reading text, of which everything before `at` is known."""
        while self.status is Status.OPEN and self.at < len(text):
            self._step(text)

    def _step(self, text: str) -> None:
        match self._expect:
            case _Expect.IN_KEY | _Expect.IN_STRING:
                self._in_string(text)
            case _Expect.IN_LITERAL:
                found = _LITERAL.match(text, self.at)
                self.at = found.end() if found else self.at
                self._expect = _Expect.IN_LITERAL if self.at == len(text) else _Expect.AFTER
            case _:
                character = text[self.at]
                if character in WHITESPACE or self._accept(character, text):
                    self.at += 1
                else:
                    self.status = Status.FAILED
        self._note_end()

    def _accept(self, character: str, text: str) -> bool:
        """Take one character that is no white space and not inside a string; False: it cannot stand here."""
        match self._expect:
            case _Expect.VALUE:
                return self._begin_value(character)
            case _Expect.FIRST_ITEM:
                return self._end(character, text) if character == "]" else self._begin_value(character)
            case _Expect.FIRST_KEY | _Expect.KEY:
                if character == "}" and self._expect is _Expect.FIRST_KEY:
                    return self._end(character, text)
                self._expect, self._string_at = _Expect.IN_KEY, self.at
                return character == '"'
            case _Expect.COLON:
                self._expect = _Expect.VALUE
                return character == ":"
            case _:
                if character == ",":
                    self._expect = _Expect.KEY if self._stack[-1] == "{" else _Expect.VALUE
                    return True
                return self._end(character, text)

    @property
    def _is_in_call(self) -> bool:
        """Whether the members of a call are being read, not something inside its arguments."""
        return not self._is_arguments_only and self._stack in (["{"], ["[", "{"])

    def _begin_value(self, character: str) -> bool:
        if not self._may_begin(character):
            return False
        if character in _CLOSING:
            self._open(character)
        elif character == '"':
            self._expect, self._string_at = _Expect.IN_STRING, self.at
        elif character in "-0123456789tfn":
            self._expect = _Expect.IN_LITERAL
        else:
            return False
        return True

    def _may_begin(self, character: str) -> bool:
        """Calls are objects, their names are strings, their arguments are objects."""
        if len(self._stack) >= MAX_DEPTH:
            return False
        if not self._stack:
            return character == "{" or (character == "[" and not self._is_arguments_only)
        if self._is_in_call:
            return character == ("{" if self._key in ARGUMENT_KEYS else '"')
        return character == "{" if self._stack == ["["] and not self._is_arguments_only else True

    def _open(self, character: str) -> None:
        if self._is_in_call or (self._is_arguments_only and not self._stack):
            self.calls[-1].start = self.at
        self._stack.append(character)
        self._expect = _Expect.FIRST_KEY if character == "{" else _Expect.FIRST_ITEM
        if self._is_in_call and character == "{":
            self.calls.append(CallText(opened_at=self.at + 1))
            self._keys = set()

    def _end(self, character: str, text: str) -> bool:
        if character != _CLOSING[self._stack[-1]]:
            return False
        if self._is_in_call and not self._is_whole(self.calls[-1], text):
            return False
        if self._stack == ["["] and len(self.calls) == self._num_before:
            return False
        self._stack.pop()
        self._expect = _Expect.AFTER
        is_arguments = self._is_in_call or (self._is_arguments_only and not self._stack)
        if is_arguments and self.calls[-1].start is not None and self.calls[-1].end is None:
            self.calls[-1].end = self.at + 1
        return not self._is_arguments_only or bool(self._stack) or self._has_sound_arguments(text)

    def _is_whole(self, call: CallText, text: str) -> bool:
        return call.name is not None and call.end is not None and self._has_sound_arguments(text)

    def _has_sound_arguments(self, text: str) -> bool:
        call = self.calls[-1]
        return self._is_trusted or is_strict_object(text[call.start : call.end])

    def _in_string(self, text: str) -> None:
        if self._escape:
            self._in_escape(text[self.at])
            return
        found = _PLAIN.match(text, self.at)
        self.at = found.end() if found else self.at
        if self.at == len(text):
            return
        if text[self.at] == "\\":
            self._escape, self._is_hex = 1, False
            self.at += 1
        elif text[self.at] == '"' and self._close_string(text[self._string_at + 1 : self.at]):
            self.at += 1
        else:
            self.status = Status.FAILED

    def _in_escape(self, character: str) -> None:
        if not self._is_hex and character == "u":
            self._escape, self._is_hex = 4, True
        elif character in ("0123456789abcdefABCDEF" if self._is_hex else '"\\/bfnrt'):
            self._escape -= 1
        else:
            self.status = Status.FAILED
            return
        self.at += 1

    def _close_string(self, raw: str) -> bool:
        is_key = self._expect is _Expect.IN_KEY
        self._expect = _Expect.COLON if is_key else _Expect.AFTER
        if not self._is_in_call:
            return True
        if is_key:
            role = "arguments" if raw in ARGUMENT_KEYS else "name" if raw in NAME_KEYS else raw
            is_new = role not in self._keys
            self._keys.add(role)
            self._key = raw
            return is_new and raw in ARGUMENT_KEYS + STRING_KEYS
        if self._key in NAME_KEYS:
            self.calls[-1].name, self.calls[-1].named_at = raw, self.at + 1
            return raw in self._names
        return True

    def _note_end(self) -> None:
        if self.status is Status.OPEN and self._expect is _Expect.AFTER and not self._stack:
            self.status = Status.DONE
