"""The parts of an answer as they come out: content, reasoning and calls, without the white space around them.

Knows what was emitted; knows no format and no text that waits.
"""

from __future__ import annotations

from kvarn.server.chat.output.call_forms.call_scan import WHITESPACE
from kvarn.server.chat.output.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    call_id,
)
from kvarn.server.chat.output.json_repair import JsonRepair


class DeltaWriter:
    """Collects deltas; take() hands them over."""

    def __init__(self, id_seed: str, *, is_mistral: bool, is_repaired: bool) -> None:
        """is_repaired: a grammar wrote the arguments, which are emitted before they are whole."""
        self.num_calls = 0
        self.is_after_call = False
        self._id_seed = id_seed
        self._is_mistral = is_mistral
        self._is_repaired = is_repaired
        self._repair = JsonRepair()  # of the last call
        self._deltas: list[Delta] = []
        self._space = ""  # white space that counts only if content follows
        self._has_content = False
        self._has_reasoning = False
        self._has_parts = False  # reasoning or a call came out: white space around those is not content

    def take(self) -> list[Delta]:
        """What was emitted since the last time."""
        taken, self._deltas = self._deltas, []
        return taken

    def end(self, num_read: int) -> None:
        """No more will come."""
        if self._space and not self.is_after_call and (self._has_content or not self._has_parts):
            self._deltas.append(ContentDelta(self._space, num_read - len(self._space)))
        self._space = ""

    def drop_space(self) -> None:
        """White space that waits is next to something that is no content."""
        self._space = ""

    def begin_reasoning(self) -> None:
        """Reasoning stands here, though it may be empty."""
        self._has_parts = True

    def content(self, text: str, end: int) -> None:
        """More content, which ends at `end` of the answer; white space that waited stands right before it."""
        text = self._space + text
        content = text.rstrip(WHITESPACE)
        self._space = text[len(content) :]
        if self._has_parts and not self._has_content:
            content = content.lstrip(WHITESPACE)
        if content:
            at = end - len(self._space) - len(content)
            last = self._deltas[-1] if self._deltas else None
            if isinstance(last, ContentDelta) and last.at + len(last.text) == at:  # one chunk costs less than two
                self._deltas[-1] = ContentDelta(last.text + content, last.at)
            else:
                self._deltas.append(ContentDelta(content, at))
            self._has_content, self.is_after_call = True, False

    def reasoning(self, text: str) -> None:
        """More of what the model thought."""
        text = self._space + text
        thought = text.rstrip(WHITESPACE)
        self._space = text[len(thought) :]
        if not self._has_reasoning:
            thought = thought.lstrip(WHITESPACE)
        if thought:
            self._deltas.append(ReasoningDelta(thought))
            self._has_reasoning = True

    def begin_call(self, name: str) -> None:
        """A call; its arguments follow."""
        identity = call_id(self._id_seed, self.num_calls, is_mistral=self._is_mistral)
        self._deltas.append(ToolCallStart(self.num_calls, identity, name))
        self.num_calls += 1
        self._repair = JsonRepair()
        self._space, self._has_parts, self.is_after_call = "", True, True

    def arguments(self, text: str) -> None:
        """More arguments of the last call."""
        self._emit_arguments(self._repair.push(text) if self._is_repaired else text)

    def cut_arguments(self) -> None:
        """The arguments of the last call end before they are whole."""
        self._emit_arguments(self._repair.end())

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(ToolCallArguments(self.num_calls - 1, text))
