"""An answer as clients of /v1/responses read it: numbered events, and the whole response.

    created  in_progress  { output_item.added  content_part.added  output_text.delta ...  output_text.done
                            content_part.done  output_item.done } ...  completed | incomplete | failed

A pure state machine over the deltas of output/; the whole response is what its events add up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.server.api.responses.items import Event, OpenCallItem, OpenItem, OpenReasoningItem, OpenTextItem
from kvarn.server.chat.output.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from kvarn.types import FinishReason, Usage

REASONS = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CANCELLED: "cancelled"}  # OpenAI lacks the second


@dataclass(frozen=True, slots=True)
class ResponseUsage:
    """What an answer took, and how much of it was reasoning."""

    tokens: Usage
    num_reasoning: int = 0

    def fields(self) -> dict[str, Any]:
        return {
            "input_tokens": self.tokens.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.tokens.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.tokens.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": self.tokens.total_tokens,
        }


class ResponseStream:
    """The events of one response, in order: start(), push() for each delta, then end() or fail()."""

    def __init__(self, echo: dict[str, Any]) -> None:
        """echo: the response's id and all that repeats the request."""
        self._echo = echo
        self._items: list[OpenItem] = []
        self._is_open = False  # whether the last item is
        self._number = 0

    def start(self) -> list[Event]:
        """The first two events."""
        response = self._fields("in_progress")
        return self._numbered(
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        )

    def push(self, delta: Delta, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """The events of one more piece of the answer; logprobs of its tokens when it is text."""
        match delta:
            case ContentDelta():
                return self._add_text(OpenTextItem, delta.text, logprobs)
            case ReasoningDelta():
                return self._add_text(OpenReasoningItem, delta.text)
            case ToolCallStart():
                return self._numbered(*self._begin(OpenCallItem(self._next_id("fc"), delta.id, delta.name)))
            case ToolCallArguments():
                return self._numbered(*self._placed(self._items[-1].add(delta.text)))

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(piece for item in self._items if isinstance(item, OpenReasoningItem) for piece in item.pieces)

    def end(self, reason: FinishReason, usage: ResponseUsage, completed_at: int) -> list[Event]:
        """The last events, the very last with the whole response."""
        events = self._close(is_whole=reason is FinishReason.STOP)
        response = self.response(reason, usage, completed_at)
        return self._numbered(*events, {"type": f"response.{response['status']}", "response": response})

    def response(self, reason: FinishReason, usage: ResponseUsage, completed_at: int) -> dict[str, Any]:
        """The response that the events of everything pushed add up to."""
        is_whole = reason is FinishReason.STOP
        self._close(is_whole=is_whole)
        ending: dict[str, Any] = {"usage": usage.fields()}
        if is_whole:
            return {**self._fields("completed"), **ending, "completed_at": completed_at}
        return {**self._fields("incomplete"), **ending, "incomplete_details": {"reason": REASONS[reason]}}

    def fail(self, code: str, message: str) -> list[Event]:
        """The only last event of a response that broke off."""
        self._close(is_whole=False)
        response = self._fields("failed") | {"error": {"code": code, "message": message}}
        return self._numbered({"type": "response.failed", "response": response})

    def _add_text(
        self, kind: type[OpenTextItem] | type[OpenReasoningItem], text: str, logprobs: Sequence[dict[str, Any]] = ()
    ) -> list[Event]:
        if not text:
            return []
        begun = []
        if not (self._is_open and isinstance(self._items[-1], kind)):
            begun = self._begin(kind(self._next_id(kind.prefix)))
        return self._numbered(*begun, *self._placed(self._items[-1].add(text, logprobs)))

    def _begin(self, item: OpenItem) -> list[Event]:
        closed = self._close(is_whole=True)
        self._items.append(item)
        self._is_open = True
        added = {"type": "response.output_item.added", "output_index": self._index, "item": item.as_added()}
        return [*closed, added, *self._placed(item.begin())]

    def _close(self, *, is_whole: bool) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item.status = "completed" if is_whole else "incomplete"
        done = {"type": "response.output_item.done", "output_index": self._index, "item": item.as_output()}
        return [*self._placed(item.finish()), done]

    def _placed(self, events: Sequence[Event]) -> list[Event]:
        return [{**event, "item_id": self._items[-1].id, "output_index": self._index} for event in events]

    def _numbered(self, *events: Event) -> list[Event]:
        numbered = [event | {"sequence_number": self._number + index} for index, event in enumerate(events)]
        self._number += len(events)
        return numbered

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _next_id(self, prefix: str) -> str:
        return f"{prefix}_{self._echo['id'].removeprefix('resp_')}_{len(self._items)}"

    def _fields(self, status: str) -> dict[str, Any]:
        output = [item.as_output() for item in self._items]
        nothing_yet = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._echo, **nothing_yet, "status": status, "output": output}
