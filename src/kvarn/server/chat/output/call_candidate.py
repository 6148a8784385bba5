"""Text that may be tool calls: a marker, the JSON, and what closes it. It is decided as a whole.

Either all of it is calls, or it fails at one character and everything before that is content.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvarn.formats.strict_json import parse_value
from kvarn.server.chat.output.call_scan import WHITESPACE, CallScan, CallText, Status
from kvarn.server.chat.output.formats import (
    CALL_ARGS,
    CALL_CLOSE,
    CALL_ID,
    CALL_OPEN,
    PYTHON_TAG,
    TOOL_CALLS,
    ToolFormat,
)
from kvarn.server.chat.output.schema_fit import fits

SEPARATOR = ";"  # between bare calls
FENCE = "```"

_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


@dataclass(frozen=True, slots=True)
class Opening:
    """How calls begin and end in one format."""

    marker: str = ""  # may stand anywhere in the content; empty: there is none
    close: str = ""
    is_bare: bool = False  # the answer may also begin with the JSON itself, and more may follow a call
    takes_names: bool = False  # name[ARGS]{...} may stand instead of {"name": ...}


OPENINGS: dict[ToolFormat, Opening] = {
    "hermes": Opening(CALL_OPEN, CALL_CLOSE),
    "llama3": Opening(PYTHON_TAG, is_bare=True),
    "mistral": Opening(TOOL_CALLS, takes_names=True),
    "json": Opening(is_bare=True),
}


@dataclass(frozen=True, slots=True)
class BegunCall:
    """A call whose form is certain, and how much of it was written: what follows can be enforced."""

    part: Literal["call", "rest", "arguments"]  # what follows `at`: all after {, all after the name, the object alone
    name: str | None  # None: not known yet
    is_closed: bool  # the marker that closes the form must follow
    at: int  # in the whole text
    written: str  # since then


class Candidate:
    """One marker and what follows it; text grows, at is the first character not consumed."""

    def __init__(self, opening: Opening, marker: str, names: Collection[str], *, is_trusted: bool) -> None:
        self.text = ""
        self.marker = marker
        self._is_marked = marker not in ("", SEPARATOR)
        self.at = len(marker)
        self.status = Status.OPEN
        self._opening = opening
        self._names = names
        self._is_trusted = is_trusted
        self._scan: CallScan | None = None
        self._json_at = 0  # after name[ARGS]

    @property
    def calls(self) -> list[CallText]:
        """The calls read so far, the last one perhaps in part."""
        return [] if self._scan is None else self._scan.calls

    @property
    def is_whole(self) -> bool:
        """Whether nothing but the closing marker is missing."""
        return self._scan is not None and self._scan.status is Status.DONE

    @property
    def num_certain(self) -> int | None:
        """Characters that are content if this fails, as those behind may be a call; None: all that was read."""
        if self._is_marked:
            return len(self.marker)
        return 1 if self.text.startswith("[") else None

    def fits(self, schemas: Mapping[str, Any]) -> bool:
        """Whether the arguments of all calls follow the schemas of what they call."""
        arguments = ((schemas.get(call.name or "", True), self.text[call.start : call.end]) for call in self.calls)
        return all(fits(schema, parse_value(text)) for schema, text in arguments)

    def begun(self, at: int) -> BegunCall | None:
        """The call that is being written, if it is certain to be one; at: of this candidate in the whole text."""
        scan = self._scan
        if scan is None or scan.status is not Status.OPEN or not scan.calls or scan.calls[-1].end is not None:
            return None
        call = scan.calls[-1]
        part: Literal["call", "rest", "arguments"]
        if call.opened_at is None:
            part, start = "arguments", self._json_at
        elif self._opening.marker:
            part, start = "call", call.opened_at
        elif call.named_at is not None and (call.start is None or call.start > call.named_at):
            part, start = "rest", call.named_at
        else:
            return None
        name = None if part == "call" else call.name
        is_closed = part == "call" and bool(self._opening.close) and not scan.is_list
        return BegunCall(part, name, is_closed, at + start, self.text[start:])

    def feed(self, text: str) -> None:
        """Read on."""
        self.text += text
        if self._scan is None:
            self._begin()
        if self._scan is not None:
            self._read(self._scan)

    def _read(self, scan: CallScan) -> None:
        if scan.status is Status.OPEN:
            scan.feed(self.text)
            self.at = scan.at
        match scan.status:
            case Status.FAILED:
                self.status = Status.FAILED
            case Status.DONE:
                self._finish()

    def _begin(self) -> None:
        """Find where the JSON begins; read again from the marker each time, which is short."""
        at = _skip_space(self.text, self.at)
        if at == len(self.text):
            return
        if not self._opening.takes_names or self.text[at] in "[{":
            self._scan = CallScan(self._names, at, is_trusted=self._is_trusted)
        else:
            self._begin_named(at)

    def _begin_named(self, start: int) -> None:
        """name[ARGS]{...}, or name[CALL_ID]id[ARGS]{...}."""
        end = _skip(self.text, start, _NAME)
        for at in range(start, end):
            if not any(name.startswith(self.text[start : at + 1]) for name in self._names):
                self._fail(at)
                return
        name = self.text[start:end]
        if end == len(self.text):
            return
        if name not in self._names:
            self._fail(end)
            return
        if self.text.startswith(CALL_ID, end):
            end = _skip(self.text, end + len(CALL_ID), _NAME)
        elif CALL_ID.startswith(self.text[end:]):
            return
        self._expect(CALL_ARGS, end)
        if self.status is Status.DONE:
            self.status = Status.OPEN
            self._json_at = self.at
            self._scan = CallScan(self._names, self.at, name=name, is_trusted=self._is_trusted)

    def _finish(self) -> None:
        if not self._opening.close:
            self.status = Status.DONE
        else:
            self._expect(self._opening.close, _skip_space(self.text, self.at))

    def _expect(self, word: str, start: int) -> None:
        """Done after word at start, failed where something else stands; open where the text ends before."""
        for offset, character in enumerate(word):
            if start + offset == len(self.text):
                return
            if self.text[start + offset] != character:
                self._fail(start + offset)
                return
        self.at, self.status = start + len(word), Status.DONE

    def _fail(self, at: int) -> None:
        self.at, self.status = at, Status.FAILED


def _skip_space(text: str, at: int) -> int:
    return _skip(text, at, WHITESPACE)


def _skip(text: str, at: int, characters: Collection[str]) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at
