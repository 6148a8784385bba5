"""The only answer of a generation as deltas, for dialects of typed pieces: /v1/responses, /v1/messages, /api."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvarn.server.chat.output.deltas import ContentDelta, Delta
from kvarn.types import Completion, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from kvarn.server.chat.generation import Generation


class DeltaReader(Protocol):
    """Takes an answer apart while it is being written."""

    def push(self, text: str) -> Sequence[Delta]: ...

    def end(self) -> Sequence[Delta]: ...


class PlainReader:
    """Takes nothing apart: all of the answer is content."""

    def push(self, text: str) -> Sequence[Delta]:
        return [ContentDelta(text)] if text else []

    def end(self) -> Sequence[Delta]:
        return ()


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What became certain at once, and the scores of the tokens read for it; completion: this was the last part."""

    deltas: Sequence[Delta]
    logprobs: Sequence[TokenLogprob] = ()
    completion: Completion | None = None


async def answer_parts(generation: Generation, reader: DeltaReader) -> AsyncIterator[AnswerPart]:
    """The answer part by part; one that ran out of time ends with its error."""
    async for batch in generation.batches():
        tokens = [event for _, event in batch]
        deltas = reader.push("".join(token.text for token in tokens))
        last = tokens[-1]
        if last.finish_reason is FinishReason.DEADLINE:
            continue
        if last.finish_reason is not None:
            deltas = [*deltas, *reader.end()]
        yield AnswerPart(deltas, [token.logprob for token in tokens if token.logprob is not None], last.completion)


def whole_answer(completion: Completion, reader: DeltaReader) -> AnswerPart:
    """A finished answer as one part."""
    return AnswerPart([*reader.push(completion.text), *reader.end()], completion.logprobs or (), completion)
