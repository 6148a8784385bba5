"""The parts of an answer: as deltas of a stream, and as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MISTRAL_ID_CHARACTERS = 9  # its templates refuse ids of any other length


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer itself."""

    text: str
    at: int = field(default=0, compare=False)  # where it stands in the whole text of the answer


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before answering."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of call `index`, as JSON text."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole answer, taken apart. None: there was nothing of the kind."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    is_cut: bool = False  # it ends within an enforced call

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, and all of them can be made."""
        return bool(self.tool_calls) and not self.is_cut


def joined(deltas: Iterable[Delta], *, is_cut: bool = False) -> ParsedOutput:
    """Put the pieces of one answer together."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: dict[int, ToolCallStart] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart(index):
                starts[index] = delta
                arguments[index] = []
            case ToolCallArguments(index, text):
                arguments[index].append(text)
    calls = (ToolCall(start.id, start.name, "".join(arguments[index])) for index, start in starts.items())
    return ParsedOutput("".join(content) or None, "".join(reasoning) or None, tuple(calls), is_cut)


def call_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call as an object; None when the answer ended in the middle of them."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def call_id(seed: str, index: int, *, is_mistral: bool) -> str:
    """The id of call `index`: the same for the same seed, which is the request's id and the choice."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).hexdigest()
    return digest[:MISTRAL_ID_CHARACTERS] if is_mistral else f"call_{digest[:24]}"
