"""An answer whose parts are messages with a channel, taken apart while it is being written.

    <|channel|>analysis<|message|>thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

The prompt ends before the first header. Text that begins with no header is content. As in output_stream.py the deltas
depend on the text alone, and a call waits until it is whole unless a grammar enforces it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from enum import Enum, auto

from kvarn.server.chat.output.call_candidate import BegunCall
from kvarn.server.chat.output.call_forms.call_scan import WHITESPACE, CallScan, CallText, Status
from kvarn.server.chat.output.content_scan import split_at
from kvarn.server.chat.output.delta_writer import DeltaWriter
from kvarn.server.chat.output.deltas import Delta, ParsedOutput, joined
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.output_stream import PIECE_CHARACTERS, AnswerContext, OutputStream

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
HEADERS = (START, CHANNEL, MESSAGE, "<|constrain|>", "to=")
MAX_HEADER_CHARACTERS = 512

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w-]+)")


class _MessagePhase(Enum):
    OPENING = auto()  # header or content
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class HarmonyStream:
    """Takes one answer apart: push its text in any pieces, then end()."""

    def __init__(self, format: OutputFormat, tools: Collection[str] = (), context: AnswerContext | None = None) -> None:
        """tools: the names that may be called."""
        assert format.is_harmony
        self.is_cut = False  # the answer ended within an enforced call
        self._names = frozenset(tools)
        self._is_enforced = context is not None and context.is_enforced
        self._parts = DeltaWriter(context.id_seed if context else "", is_mistral=False, is_repaired=self._is_enforced)
        self._phase = _MessagePhase.OPENING
        self._num_read = 0
        self._rest = ""  # text not decided yet: the end of what was read; all of a call
        self._scan = CallScan((), 0, [])
        self._num_emitted = 0  # characters of the call's arguments

    def parse(self, text: str) -> ParsedOutput:
        """A whole answer: reasoning, content and calls."""
        return joined([*self.push(text), *self.end()], is_cut=self.is_cut)

    def push(self, text: str) -> list[Delta]:
        """What became certain with more text."""
        for begin in range(0, len(text), PIECE_CHARACTERS):
            piece = text[begin : begin + PIECE_CHARACTERS]
            self._num_read += len(piece)
            self._rest += piece
            while self._rest and self._advance():
                pass
        return self._parts.take()

    def end(self) -> list[Delta]:
        """What was held back, now that no more will come."""
        match self._phase:
            case _MessagePhase.OPENING | _MessagePhase.CONTENT:
                rest, self._rest = self._rest, ""
                self._parts.content(rest, self._num_read)
            case _MessagePhase.REASONING:
                self._parts.reasoning(self._rest)
            case _MessagePhase.CALL:
                self._cut_call()
            case _:  # a header that is not whole says nothing
                pass
        self._rest = ""
        self._parts.end(self._num_read)
        return self._parts.take()

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._parts.num_calls

    @property
    def begun(self) -> BegunCall | None:
        """The call that is being written, if it is certain to be one."""
        if self._phase is not _MessagePhase.CALL or self._scan.status is not Status.OPEN:
            return None
        return BegunCall("arguments", self._scan.calls[0].name, False, self._num_read - len(self._rest), self._rest)

    def _advance(self) -> bool:
        """Decide as much as one phase can; True: there is more to decide."""
        match self._phase:
            case _MessagePhase.OPENING:
                return self._read_opening()
            case _MessagePhase.HEADER:
                return self._read_header()
            case _MessagePhase.CALL:
                return self._read_call()
            case _:
                return self._read_text()

    def _read_opening(self) -> bool:
        text = self._rest.lstrip(WHITESPACE)
        if any(text.startswith(word) for word in HEADERS):
            self._phase = _MessagePhase.HEADER
        elif any(word.startswith(text) for word in HEADERS):
            return False
        else:
            self._phase = _MessagePhase.CONTENT
        return True

    def _read_header(self) -> bool:
        header, is_whole, rest = split_at(self._rest, MESSAGE)
        if is_whole:
            self._rest = rest
            self._enter(header)
        elif len(header) > MAX_HEADER_CHARACTERS:
            self._phase = _MessagePhase.CONTENT
        else:
            return False
        return True

    def _enter(self, header: str) -> None:
        """Begin the message after a header."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._phase, self._num_emitted = _MessagePhase.CALL, 0
            self._scan = CallScan(self._names, 0, [], name=recipient[1], is_trusted=self._is_enforced)
        elif channel is not None and channel[1] == "analysis":
            self._phase = _MessagePhase.REASONING
            self._parts.begin_reasoning()
        else:
            self._phase = _MessagePhase.CONTENT

    def _read_text(self) -> bool:
        text, end, self._rest = split_at_any(self._rest, ENDS)
        if self._phase is _MessagePhase.REASONING:
            self._parts.reasoning(text)
        else:
            self._parts.content(text, self._num_read - len(self._rest) - len(end))
        if end:
            self._parts.drop_space()
            self._phase = _MessagePhase.HEADER
        return bool(end)

    def _read_call(self) -> bool:
        self._scan.feed(self._rest)
        if self._scan.status is Status.FAILED and not self._num_emitted:
            self._phase = _MessagePhase.CONTENT
            return True
        if self._is_enforced or self._scan.status is Status.DONE:
            self._emit_call(self._scan.calls[0])
        if self._scan.status is Status.OPEN:
            return False
        self._rest = self._rest[self._scan.at :]
        self._phase = _MessagePhase.CONTENT  # nothing but white space, usually
        return True

    def _emit_call(self, call: CallText) -> None:
        if call.name is None or not call.has_arguments:
            return
        if not self._num_emitted:
            self._parts.begin_call(call.name)
        more = call.arguments(self._rest, self._scan.at, self._num_emitted)
        self._parts.arguments(more)
        self._num_emitted += len(more)

    def _cut_call(self) -> None:
        """The answer ended within a call."""
        if self._num_emitted:
            self.is_cut = True
            self._parts.cut_arguments()
        else:
            self.is_cut = self._is_enforced
            rest, self._rest = self._rest, ""
            self._parts.content(rest, self._num_read)


AnswerReader = OutputStream | HarmonyStream


def split_at_any(text: str, words: Sequence[str]) -> tuple[str, str, str]:
    """Text before the first of the words, that word, and what follows; or what cannot begin one, "", what might."""
    found = [(text.find(word), word) for word in words if word in text]
    if found:
        at, word = min(found)
        return text[:at], word, text[at + len(word) :]
    held = max((split_at(text, word)[2] for word in words), key=len)
    return text[: len(text) - len(held)], "", held
