"""The items of a response's output while they are being written: message, function call, reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

Event = dict[str, Any]
Logprobs = Sequence[dict[str, Any]]


class OpenItem(Protocol):
    """One item: begin(), add() pieces, finish(). The events lack item_id, output_index and number."""

    id: str
    status: str

    def begin(self) -> list[Event]: ...
    def add(self, text: str, logprobs: Logprobs = ()) -> list[Event]: ...
    def finish(self) -> list[Event]: ...
    def as_added(self) -> dict[str, Any]: ...
    def as_output(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class OpenTextItem:
    """A message of the assistant with one part of text."""

    prefix: ClassVar[str] = "msg"
    id: str
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> list[Event]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def add(self, text: str, logprobs: Logprobs = ()) -> list[Event]:
        self.pieces.append(text)
        self.logprobs += logprobs
        fields = {"delta": text, "logprobs": list(logprobs)}
        return [{"type": "response.output_text.delta", "content_index": 0, **fields}]

    def finish(self) -> list[Event]:
        part = self._part()
        fields = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            {"type": "response.output_text.done", "content_index": 0, **fields},
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]

    def as_added(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}

    def as_output(self) -> dict[str, Any]:
        return {**self.as_added(), "status": self.status, "content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        text, logprobs = "".join(self.pieces), list(self.logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass(slots=True)
class OpenReasoningItem:
    """What the model thinks before it answers."""

    prefix: ClassVar[str] = "rs"
    id: str
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list)

    def begin(self) -> list[Event]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def add(self, text: str, logprobs: Logprobs = ()) -> list[Event]:  # noqa: ARG002
        self.pieces.append(text)
        return [{"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}]

    def finish(self) -> list[Event]:
        part = self._part()
        return [
            {"type": "response.reasoning_text.done", "content_index": 0, "text": part["text"]},
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]

    def as_added(self) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}

    def as_output(self) -> dict[str, Any]:
        return {**self.as_added(), "status": self.status, "content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self.pieces)}


@dataclass(slots=True)
class OpenCallItem:
    """A call of a function."""

    prefix: ClassVar[str] = "fc"
    id: str
    call_id: str
    name: str
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list)

    def begin(self) -> list[Event]:
        return []

    def add(self, text: str, logprobs: Logprobs = ()) -> list[Event]:  # noqa: ARG002
        self.pieces.append(text)
        return [{"type": "response.function_call_arguments.delta", "delta": text}]

    def finish(self) -> list[Event]:
        fields = {"name": self.name, "arguments": "".join(self.pieces)}
        return [{"type": "response.function_call_arguments.done", **fields}]

    def as_added(self) -> dict[str, Any]:
        return {**self.as_output(), "status": "in_progress", "arguments": ""}

    def as_output(self) -> dict[str, Any]:
        known = {"call_id": self.call_id, "name": self.name, "arguments": "".join(self.pieces)}
        return {"id": self.id, "type": "function_call", "status": self.status, **known}
