"""A response as it is sent: the events of a ResponseStream, with the logprobs of their text, and the usage last."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvarn.server.api.openai.logprobs import TextScores, chat_logprobs
from kvarn.server.api.responses.errors import error_fields
from kvarn.server.api.responses.items import Event
from kvarn.server.api.responses.response_stream import ResponseStream, ResponseUsage
from kvarn.server.chat.delta_stream import AnswerPart
from kvarn.server.chat.output.deltas import ContentDelta, Delta
from kvarn.types import Completion, FinishReason

if TYPE_CHECKING:
    from kvarn.server.failures import Failure
    from kvarn.tokenizer.incremental import IncrementalDecoder
    from kvarn.tokenizer.tokenizer import Tokenizer


class ResponseWriter:
    """Feeds a stream; logprobs of tokens go with their text, those of other parts are dropped."""

    def __init__(self, stream: ResponseStream, tokenizer: Tokenizer, decoder: IncrementalDecoder) -> None:
        """decoder: a fresh one, that reads the tokens as the engine does."""
        self._stream = stream
        self._tokenizer = tokenizer
        self._scores = TextScores(tokenizer, decoder)

    def start(self) -> list[Event]:
        """The first events."""
        return self._stream.start()

    def events(self, part: AnswerPart) -> list[Event]:
        """The events of one more part of the answer."""
        self._scores.add(part.logprobs)
        return [event for delta in part.deltas for event in self._stream.push(delta, self._logprobs(delta))]

    def end(self, completion: Completion) -> list[Event]:
        """The last events, the very last with the whole response."""
        return self._stream.end(*self._ending(completion))

    def response(self, answer: AnswerPart) -> dict[str, Any]:
        """The whole response of an answer that comes as one part."""
        assert answer.completion is not None
        self.events(answer)
        return self._stream.response(*self._ending(answer.completion))

    def error_event(self, failure: Failure) -> bytes:
        """The last event of a response that broke off."""
        return write_events(self._stream.fail(**error_fields(failure)))

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if not isinstance(delta, ContentDelta):
            return []
        return chat_logprobs(self._tokenizer, self._scores.take(delta.at, delta.at + len(delta.text)))

    def _ending(self, completion: Completion) -> tuple[FinishReason, ResponseUsage, int]:
        thoughts = self._stream.reasoning
        num_reasoning = len(self._tokenizer.encode(thoughts, add_special=False)) if thoughts else 0
        usage = ResponseUsage(completion.usage, min(num_reasoning, completion.usage.completion_tokens))
        return completion.finish_reason, usage, int(time.time())


def write_events(events: Iterable[Event]) -> bytes:
    """Events as they are sent."""
    written = (f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
    return "".join(written).encode()
