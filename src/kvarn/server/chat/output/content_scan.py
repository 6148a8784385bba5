"""Where a tool call may begin in content: at the marker of the model's format, or as JSON, bare or in a code fence.

    free     a fence or a bare object counts at the start of any line
    else     a grammar lets calls begin only as the model's own format has them

Knows how calls begin; whether it is one is decided by call_candidate.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvarn.server.chat.output.call_candidate import FENCE, SEPARATOR
from kvarn.server.chat.output.call_forms.call_scan import WHITESPACE
from kvarn.server.chat.output.call_forms.form import CallForm

_FENCE_LINE = re.compile(r"```[A-Za-z0-9_+.-]{0,32}")


@dataclass(frozen=True, slots=True)
class Found:
    """What is decided of a text."""

    content: str
    rest: str  # not decided yet, or what the opening begins with
    opening: str | None = None  # a call may begin here: with a marker or fence, or "": the JSON itself
    is_closed_fence: bool = False  # the fence of a call ended right before the rest
    has_more: bool = False  # the rest can be read at once


class ContentScan:
    """Reads content; told of each candidate how it ended."""

    def __init__(self, form: CallForm, *, is_free: bool) -> None:
        self._form = form
        self._is_free = is_free
        self._is_native = form.is_bare  # a bare call would stand where the model's own format has it
        self._is_line_start = is_free
        self._is_in_fence = False  # of a call
        self._is_in_text_fence = False  # of anything else

    @property
    def is_native(self) -> bool:
        """Whether a bare call that begins here has the model's own format."""
        return self._is_native

    def read(self, text: str, *, is_after_call: bool) -> Found:
        """Find the first place where a call may begin."""
        if not (self._is_native or self._is_line_start):
            return self._read_line(text)
        bare = text.lstrip(WHITESPACE)
        space = text[: len(text) - len(bare)]
        if not bare or self._may_be_marker(bare):
            return Found(space, bare)
        if self._form.marker and bare.startswith(self._form.marker):
            return Found(space, bare, self._form.marker)
        if bare[0] in "{[":
            return Found(space, bare, "")
        if bare[0] == SEPARATOR and is_after_call and self._is_native:
            return Found(space, bare, SEPARATOR)
        fence = self._read_fence(space, bare) if bare[0] == "`" and self._is_line_start else None
        if fence is not None:
            return fence
        self._is_native = self._is_line_start = self._is_in_fence = False
        line = self._read_line(bare)
        return Found(space + line.content, line.rest, line.opening, has_more=line.has_more)

    def after_call(self, marker: str) -> None:
        """What was read before the next text was a call."""
        self._is_native, self._is_line_start = self._form.is_bare, self._is_free
        self._is_in_fence |= marker.startswith(FENCE)

    def after_failure(self, marker: str) -> None:
        """It was none; the marker of a call is like a line of its own."""
        self._is_native = self._is_in_fence = False
        self._is_in_text_fence |= marker.startswith(FENCE)
        self._is_line_start = self._is_free and bool(marker) and marker == self._form.marker

    def _may_be_marker(self, text: str) -> bool:
        """Whether more text decides if the marker stands here."""
        return len(text) < len(self._form.marker) and self._form.marker.startswith(text)

    def _read_fence(self, space: str, text: str) -> Found | None:
        """A fence that opens or closes; None: there is none."""
        if self._is_in_fence and text.startswith(FENCE):
            self._is_in_fence = False
            return Found("", text[len(FENCE) :], is_closed_fence=True, has_more=True)
        line = _FENCE_LINE.match(text)
        end = len(text) if FENCE.startswith(text) else line.end() if line else 0
        if end == len(text):
            return Found(space, text)
        if end == len(FENCE) and self._is_in_text_fence:
            self._is_in_text_fence = False
            return None
        return Found(space, text, text[:end]) if end and text[end] in WHITESPACE + "{[" else None

    def _read_line(self, text: str) -> Found:
        end = text.find("\n") + 1 if self._is_free else 0
        line = text[:end] if end else text
        content, is_marked, after = split_at(line, self._form.marker)
        if is_marked:
            return Found(content, self._form.marker + after + text[len(line) :], self._form.marker)
        if not end:
            return Found(content, after)
        self._is_line_start = True
        return Found(line, text[end:], has_more=end < len(text))


def split_at(text: str, word: str) -> tuple[str, bool, str]:
    """Text before word, whether it is there, and what follows; or what cannot begin it, False, and what might."""
    if not word:
        return text, False, ""
    before, found, after = text.partition(word)
    if found:
        return before, True, after
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if word.startswith(text[-length:]):
            return text[:-length], False, text[-length:]
    return text, False, ""
