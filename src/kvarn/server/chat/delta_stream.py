"""The only answer of a generation as deltas, for dialects that write typed events: /v1/responses and /v1/messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarn.server.chat.output.deltas import Delta
from kvarn.server.chat.output.harmony_stream import AnswerReader
from kvarn.types import Completion, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from kvarn.server.chat.generation import Generation


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What became certain at once, and the scores of the tokens read for it; completion: this was the last part."""

    deltas: Sequence[Delta]
    logprobs: Sequence[TokenLogprob] = ()
    completion: Completion | None = None


async def answer_parts(generation: Generation, reader: AnswerReader) -> AsyncIterator[AnswerPart]:
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


def whole_answer(completion: Completion, reader: AnswerReader) -> AnswerPart:
    """A finished answer as one part."""
    return AnswerPart([*reader.push(completion.text), *reader.end()], completion.logprobs or (), completion)
