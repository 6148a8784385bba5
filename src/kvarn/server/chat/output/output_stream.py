"""An answer taken apart while it is being written: reasoning, content and tool calls.

    opening ──<think>──> reasoning ──</think>──> content <──whole, or failed──> candidate

The deltas depend on the text, never on how it was cut into pieces. Nothing emitted is ever taken back, so a call waits
until it is whole; only where a grammar enforces the form (is_enforced) are its arguments emitted as they are written,
and repaired: what is sure to be a call can no longer become content.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from kvarn.server.chat.output.call_candidate import SEPARATOR, BegunCall, Candidate
from kvarn.server.chat.output.call_forms.call_scan import WHITESPACE, Status
from kvarn.server.chat.output.call_forms.form import CallForm
from kvarn.server.chat.output.call_forms.table import FORMS
from kvarn.server.chat.output.content_scan import ContentScan, split_at
from kvarn.server.chat.output.delta_writer import DeltaWriter
from kvarn.server.chat.output.deltas import ContentDelta, Delta, ParsedOutput, joined
from kvarn.server.chat.output.formats import OutputFormat

PIECE_CHARACTERS = 1024
REREAD_CHARACTERS = 1 << 16  # that may be read again after candidates that failed, ...
REREAD_SHARE = 2  # ... and so many more for each character of the answer: hostile text stays linear


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What the text alone does not tell."""

    id_seed: str = ""  # ids of calls are derived from it and their index
    is_enforced: bool = False  # a grammar lets no text look like a call that is none
    starts_in_reasoning: bool = False  # the prompt ends with the tag that opens the reasoning


class _Phase(Enum):
    OPENING = auto()
    REASONING = auto()
    CONTENT = auto()
    CANDIDATE = auto()


class OutputStream:
    """Takes one answer apart: push its text in any pieces, then end()."""

    def __init__(self, format: OutputFormat, tools: Collection[str] = (), context: AnswerContext | None = None) -> None:
        """tools: the names that may be called, or their schemas by name; without any, calls are not looked for."""
        self.is_cut = False  # the answer ended within an enforced call
        self._context = context or AnswerContext()
        self._names = frozenset(tools)
        self._schemas = tools if isinstance(tools, Mapping) else {}
        has_tools = bool(self._names) and format.tool_format is not None
        self._form = FORMS[format.tool_format] if has_tools and format.tool_format else CallForm()
        self._tags = format.reasoning
        self._phase = _Phase.OPENING if self._tags is not None else _Phase.CONTENT
        self._is_plain = self._tags is None and not has_tools
        self._num_read = 0  # characters of the answer
        self._rest = ""  # text not decided yet: the end of what was read
        self._parts = DeltaWriter(
            self._context.id_seed, is_mistral=format.is_mistral, is_repaired=self._context.is_enforced
        )
        self._candidate: Candidate | None = None
        self._content = ContentScan(self._form, is_free=has_tools and not self._context.is_enforced)
        self._must_fit = False  # the candidate is a call only if its arguments fit the schema
        self._num_started = 0  # calls of the candidate that came out, the last one perhaps in part
        self._num_emitted = 0  # characters of the arguments of that one that came out
        self._num_reread = 0  # characters read again after candidates that failed

    def parse(self, text: str) -> ParsedOutput:
        """A whole answer: reasoning, content and calls."""
        return joined([*self.push(text), *self.end()], is_cut=self.is_cut)

    def push(self, text: str) -> list[Delta]:
        """What became certain with more text."""
        if self._is_plain:
            at, self._num_read = self._num_read, self._num_read + len(text)
            return [ContentDelta(text, at)] if text else []
        # In pieces, because what follows a failed candidate is copied each time: hostile text stays linear.
        for begin in range(0, len(text), PIECE_CHARACTERS):
            piece = text[begin : begin + PIECE_CHARACTERS]
            self._num_read += len(piece)
            self._rest += piece
            while self._advance():
                pass
        return self._parts.take()

    def end(self) -> list[Delta]:
        """What was held back, now that no more will come."""
        while self._rest or self._candidate is not None:
            self._give_up()
            while self._advance():
                pass
        self._parts.end(self._num_read)
        return self._parts.take()

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._parts.num_calls

    @property
    def begun(self) -> BegunCall | None:
        """The call that is being written, if it is certain to be one."""
        candidate = self._candidate
        return None if candidate is None else candidate.begun(self._num_read - len(candidate.text))

    def _advance(self) -> bool:
        """Decide as much as one phase can; True: another phase goes on with the rest."""
        if self._phase is _Phase.CANDIDATE:
            return self._read_candidate()
        if not self._rest:
            return False
        match self._phase:
            case _Phase.OPENING:
                return self._read_opening()
            case _Phase.REASONING:
                return self._read_reasoning()
            case _:
                return self._read_content()

    def _give_up(self) -> None:
        """The end of the text decides what was open: it is not what it might have been."""
        if self._candidate is not None:
            self._give_up_candidate(self._candidate)
        elif self._phase is _Phase.OPENING:
            self._leave_opening()
        elif self._phase is _Phase.REASONING:
            self._parts.reasoning(self._rest)
            self._rest = ""
        else:
            content, self._rest = self._rest, ""
            self._emit_content(content)

    def _give_up_candidate(self, candidate: Candidate) -> None:
        """Only what closes it may be missing of a call."""
        if candidate.is_whole and not self._context.is_enforced:
            self._emit_calls(candidate)
            self._close_candidate(len(candidate.text))
        else:
            self._drop_candidate(len(candidate.text))

    def _read_opening(self) -> bool:
        assert self._tags is not None
        text = self._rest.lstrip(WHITESPACE)
        if text.startswith(self._tags.open):
            self._rest = text.removeprefix(self._tags.open)
            self._enter_reasoning()
            return True
        if self._tags.open.startswith(text):
            return False
        self._leave_opening()
        return True

    def _leave_opening(self) -> None:
        if self._context.starts_in_reasoning:
            self._enter_reasoning()
        else:
            self._phase = _Phase.CONTENT

    def _enter_reasoning(self) -> None:
        self._phase = _Phase.REASONING
        self._parts.begin_reasoning()

    def _read_reasoning(self) -> bool:
        assert self._tags is not None
        thought, is_closed, self._rest = split_at(self._rest, self._tags.close)
        self._parts.reasoning(thought)
        if is_closed:
            self._phase = _Phase.CONTENT
            self._parts.drop_space()
        return is_closed

    def _read_content(self) -> bool:
        found = self._content.read(self._rest, is_after_call=self._parts.is_after_call)
        self._rest = found.rest
        if found.is_closed_fence:
            self._parts.drop_space()
        self._emit_content(found.content)
        return found.has_more if found.opening is None else self._open_candidate(found.opening)

    def _open_candidate(self, marker: str) -> bool:
        is_marked = bool(marker) and marker == self._form.marker
        form = self._form if is_marked else CallForm()
        self._must_fit = not is_marked and ((bool(marker) and marker != SEPARATOR) or not self._content.is_native)
        self._candidate = Candidate(form, marker, self._names, self._schemas, is_trusted=self._context.is_enforced)
        self._num_started = 0
        self._phase = _Phase.CANDIDATE
        return True

    def _read_candidate(self) -> bool:
        assert self._candidate is not None
        candidate = self._candidate
        candidate.feed(self._rest)
        self._rest = ""
        is_call = candidate.status is Status.DONE and (not self._must_fit or candidate.fits)
        if self._context.is_enforced or is_call:
            self._emit_calls(candidate)
        if is_call:
            self._close_candidate(candidate.at)
        elif candidate.status is not Status.OPEN:
            self._drop_candidate(candidate.at)
        return self._phase is not _Phase.CANDIDATE

    def _emit_calls(self, candidate: Candidate) -> None:
        """Give out what is known of the candidate's calls and has not come out yet."""
        for position, call in enumerate(candidate.calls):
            if call.name is None or not call.has_arguments or position + 1 < self._num_started:
                continue
            if position == self._num_started:
                self._parts.begin_call(call.name)
                self._num_started += 1
                self._num_emitted = 0
            more = call.arguments(candidate.text, candidate.at, self._num_emitted)
            self._parts.arguments(more)
            self._num_emitted += len(more)

    def _drop_candidate(self, at: int) -> None:
        """What was read is content, unless calls of it came out already."""
        assert self._candidate is not None
        candidate = self._candidate
        self.is_cut |= self._context.is_enforced and candidate.has_open_call
        if self._num_started:
            self._close_candidate(at)
            self._parts.cut_arguments()
            return
        if not self._context.is_enforced and candidate.num_certain is not None and self._may_reread(candidate, at):
            at = candidate.num_certain
        self._close_candidate(at)
        self._emit_content(candidate.text[:at])
        self._content.after_failure(candidate.marker)

    def _may_reread(self, candidate: Candidate, at: int) -> bool:
        """Whether calls are looked for inside a candidate that failed at this character."""
        num_before = self._num_read - len(candidate.text) + at
        self._num_reread += at
        return self._num_reread <= REREAD_CHARACTERS + REREAD_SHARE * num_before

    def _close_candidate(self, at: int) -> None:
        assert self._candidate is not None
        if self._num_started:
            self._content.after_call(self._candidate.marker)
        self._rest = self._candidate.text[at:] + self._rest
        self._candidate = None
        self._phase = _Phase.CONTENT

    def _emit_content(self, text: str) -> None:
        """Content that ends where the rest begins."""
        self._parts.content(text, self._num_read - len(self._rest))
