"""Answers as Ollama's clients read them: lines of JSON, and the whole answer, which is what the lines add up to.

A call is one piece, its arguments an object: it is written when it is whole, and not at all if the answer ends in it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from kvarn.errors import Cancelled
from kvarn.server.api.ollama.errors import error_body
from kvarn.server.api.openai.logprobs import chat_logprobs
from kvarn.server.chat.output.deltas import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    call_arguments,
)
from kvarn.server.failures import Failure
from kvarn.server.http.sse import StreamFormat
from kvarn.types import Completion, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from kvarn.server.chat.delta_stream import AnswerPart
    from kvarn.tokenizer.tokenizer import Tokenizer

NDJSON = "application/x-ndjson"
Fields = dict[str, Any]
Shape = Literal["chat", "generate"]


@dataclass(slots=True)
class LineWriter:
    """The lines of one answer, in the shape of /api/chat or of /api/generate."""

    model: str
    shape: Shape
    tokenizer: Tokenizer
    load_s: float = 0.0
    _call: ToolCallStart | None = None  # that is being written
    _arguments: list[str] = field(default_factory=list)

    def lines(self, part: AnswerPart) -> list[Fields]:
        """What one more part of the answer adds, and the last line after the last one."""
        lines = [self._line(piece) for piece in self._pieces(part)]
        if scores := self._scores(part.logprobs):
            lines = lines or [self._line({})]
            lines[-1] |= scores
        return [*lines, self._line({}) | self._ending(part.completion)] if part.completion is not None else lines

    def whole(self, part: AnswerPart) -> Fields:
        """The whole answer in one object."""
        assert part.completion is not None
        line = self._line(_added(self._pieces(part)))
        return line | self._scores(part.logprobs) | self._ending(part.completion)

    def empty_line(self) -> bytes:
        """A line that says nothing, for streams that are silent for long."""
        return line_bytes(self._line({}))

    def _pieces(self, part: AnswerPart) -> list[Fields]:
        pieces: list[Fields] = []
        for delta in part.deltas:
            if isinstance(delta, ToolCallArguments):
                self._arguments.append(delta.text)
                continue
            pieces += self._ended_call()
            match delta:
                case ContentDelta(text) if text:
                    pieces.append({"content": text})
                case ReasoningDelta(text) if text:
                    pieces.append({"thinking": text})
                case ToolCallStart():
                    self._call, self._arguments = delta, []
        return _joined([*pieces, *(self._ended_call() if part.completion is not None else ())])

    def _ended_call(self) -> list[Fields]:
        call, self._call = self._call, None
        arguments = None if call is None else call_arguments("".join(self._arguments))
        if call is None or arguments is None:
            return []
        function = {"index": call.index, "name": call.name, "arguments": arguments}
        return [{"tool_calls": [{"id": call.id, "function": function}]}]

    def _line(self, piece: Fields) -> Fields:
        return _line(self.model, self.shape, piece)

    def _scores(self, scores: Sequence[TokenLogprob]) -> Fields:
        return {"logprobs": chat_logprobs(self.tokenizer, scores)} if scores else {}

    def _ending(self, completion: Completion) -> Fields:
        if completion.finish_reason is FinishReason.CANCELLED:
            raise Cancelled("the request was cancelled")
        timings, usage = completion.timings, completion.usage
        spent_s = self.load_s + timings.queue_s + timings.prefill_s + timings.decode_s
        return {
            "done": True,
            "done_reason": "length" if completion.finish_reason is FinishReason.LENGTH else "stop",
            "total_duration": _ns(spent_s),
            "load_duration": _ns(self.load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(timings.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(timings.decode_s),
        }


def empty_answer(model: str, shape: Shape, reason: Literal["load", "unload"]) -> Fields:
    """The answer to a request that has no prompt."""
    return _line(model, shape, {}) | {"done": True, "done_reason": reason}


def _line(model: str, shape: Shape, piece: Fields) -> Fields:
    said: Fields
    if shape == "chat":
        said = {"message": {"role": "assistant", "content": "", **piece}}
    else:
        said = {"response": piece.get("content", ""), **{name: piece[name] for name in piece if name != "content"}}
    return {"model": model, "created_at": now(), **said, "done": False}


async def line_stream(writer: LineWriter, parts: AsyncIterator[AnswerPart]) -> AsyncIterator[bytes]:
    """The lines of an answer as they come."""
    async for part in parts:
        if lines := writer.lines(part):
            yield b"".join(map(line_bytes, lines))


def stream_format(writer: LineWriter) -> StreamFormat:
    """Lines instead of events; a silent stream says nothing in a line of its own."""
    return line_format(writer.empty_line)


def line_format(silent_line: Callable[[], bytes]) -> StreamFormat:
    """Lines of JSON; silent_line: what a stream that says nothing for long says."""
    return StreamFormat(_error_line, comment=lambda _: silent_line(), media_type=NDJSON)


def line_bytes(fields: Fields) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _error_line(failure: Failure) -> bytes:
    return line_bytes(error_body(failure))


def _joined(pieces: Sequence[Fields]) -> list[Fields]:
    """Neighbours of one kind as one."""
    joined: list[Fields] = []
    for piece in pieces:
        if joined and joined[-1].keys() == piece.keys():
            joined[-1] = _added([joined[-1], piece])
        else:
            joined.append(piece)
    return joined


def _added(pieces: Sequence[Fields]) -> Fields:
    added: Fields = {}
    for piece in pieces:
        for name, value in piece.items():
            added[name] = added[name] + value if name in added else value
    return added


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
