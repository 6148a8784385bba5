"""An answer as Anthropic's clients read it: the events of a stream, and the whole message.

    message_start  { content_block_start  content_block_delta ...  content_block_stop } ...  message_delta  message_stop

A pure state machine over the deltas of output/; the whole message is what its events add up to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvarn.server.chat.output.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    call_arguments,
)
from kvarn.types import FinishReason, Usage

Event = dict[str, Any]
BlockKind = Literal["text", "thinking", "tool_use"]
DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
DELTAS |= {"tool_use": ("input_json_delta", "partial_json")}


@dataclass(slots=True)
class _Block:
    """One content block and the pieces it was written in."""

    kind: BlockKind
    head: dict[str, Any]  # of a tool_use: id and name
    pieces: list[str] = field(default_factory=list)

    def as_started(self) -> dict[str, Any]:
        empty: dict[BlockKind, dict[str, Any]] = {
            "text": {"text": ""},
            "thinking": {"thinking": "", "signature": ""},
            "tool_use": {"input": {}},
        }
        return {"type": self.kind, **self.head, **empty[self.kind]}

    def as_content(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        if self.kind == "tool_use":
            return {**self.as_started(), "input": call_arguments(text) or {}}
        return {**self.as_started(), self.kind: text}

    @property
    def is_whole_call(self) -> bool:
        return self.kind == "tool_use" and call_arguments("".join(self.pieces)) is not None


class MessageStream:
    """The events of one message, in order: start(), push() for each group of deltas, end()."""

    def __init__(self, message_id: str, model: str, prompt_tokens: int) -> None:
        self._id = message_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._blocks: list[_Block] = []
        self._is_open = False  # whether the last block is

    def start(self) -> list[Event]:
        """The first two events."""
        usage = {**_usage(Usage(self._prompt_tokens, 0)), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message(None, None, usage)}, {"type": "ping"}]

    def push(self, delta: Delta) -> list[Event]:
        """The events of one more piece of the answer."""
        match delta:
            case ContentDelta():
                return self._add_text("text", delta.text)
            case ReasoningDelta():
                return self._add_text("thinking", delta.text)
            case ToolCallStart():
                return self._begin(_Block("tool_use", {"id": delta.id, "name": delta.name}))
            case ToolCallArguments():
                return self._add(delta.text)

    def end(self, reason: FinishReason, stop_match: str | int | None, usage: Usage) -> list[Event]:
        """The last events."""
        stop_reason, stop_sequence = self._stop(reason, stop_match)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": _usage(usage)},
            {"type": "message_stop"},
        ]

    def message(self, reason: FinishReason, stop_match: str | int | None, usage: Usage) -> dict[str, Any]:
        """The message that the events of everything pushed add up to."""
        return self._message(*self._stop(reason, stop_match), _usage(usage))

    def _add_text(self, kind: BlockKind, text: str) -> list[Event]:
        if not text:
            return []
        is_going_on = self._is_open and self._blocks[-1].kind == kind
        return [*([] if is_going_on else self._begin(_Block(kind, {}))), *self._add(text)]

    def _begin(self, block: _Block) -> list[Event]:
        closed = self._close()
        self._blocks.append(block)
        self._is_open = True
        started = {"type": "content_block_start", "index": self._index, "content_block": block.as_started()}
        return [*closed, started]

    def _add(self, text: str) -> list[Event]:
        block = self._blocks[-1]
        block.pieces.append(text)
        kind, name = DELTAS[block.kind]
        return [{"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": self._index}]

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _stop(self, reason: FinishReason, stop_match: str | int | None) -> tuple[str, str | None]:
        if reason is FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(stop_match, str):
            return "stop_sequence", stop_match
        calls = [block for block in self._blocks if block.kind == "tool_use"]
        return "tool_use" if calls and calls[-1].is_whole_call else "end_turn", None

    def _message(self, stop_reason: str | None, stop_sequence: str | None, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [block.as_content() for block in self._blocks],
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts tokens found in the cache apart from those read anew."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
