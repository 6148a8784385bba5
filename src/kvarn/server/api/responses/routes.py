"""POST /v1/responses, without a memory: the whole conversation comes with each request."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.api.openai.logprobs import TextScores, chat_logprobs
from kvarn.server.api.responses.echo import echo_of
from kvarn.server.api.responses.items import Event
from kvarn.server.api.responses.response_stream import ResponseStream, ResponseUsage
from kvarn.server.api.responses.schema import ResponsesAnswer, ResponsesBody
from kvarn.server.api.responses.translation import chat_fields
from kvarn.server.api.schema import EVENT_STREAM, body_of, parse
from kvarn.server.call import Charged
from kvarn.server.chat.conversation import chat_submission, conversation_of
from kvarn.server.chat.delta_stream import AnswerPart, pieces, reader_of, whole
from kvarn.server.chat.generation import Generation, begin
from kvarn.server.chat.generation_plan import RequestOptions
from kvarn.server.chat.output.deltas import ContentDelta, Delta
from kvarn.server.chat.output.output_stream import OutputStream
from kvarn.server.failures import failure_of
from kvarn.server.http.sse import stream_response
from kvarn.tokenizer.incremental import IncrementalDecoder
from kvarn.tokenizer.tokenizer import Tokenizer
from kvarn.types import Completion, FinishReason

router = APIRouter(tags=["responses"])
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post("/v1/responses", response_model=ResponsesAnswer, responses=RESPONSES, openapi_extra=body_of(ResponsesBody))
async def create_response(call: Charged) -> Response:
    """Answer a conversation, whole or as a stream."""
    body = parse(ResponsesBody, await call.json(), call)
    chat = conversation_of(parse(ChatBody, chat_fields(body), call), call.state.config)
    served = await call.use_model(body.model)
    wishes = RequestOptions(limit_field="max_output_tokens")
    generation = await begin(call, served, lambda: [chat_submission(served, chat)], wishes)
    stream = ResponseStream(echo_of(body, f"resp_{call.id}", served.id, int(time.time())))
    teller = Teller(stream, served.llm.llm.tokenizer, _decoder(generation))
    reader = reader_of(generation, chat)
    if body.stream:
        events = _events(generation, reader, teller)
        return stream_response(call, events, error_event=teller.failed, done=b"")
    (completion,) = await generation.finish()
    teller.tell(whole(completion, reader))
    return call.reply(stream.whole(*teller.ending(completion)))


def _decoder(generation: Generation) -> IncrementalDecoder:
    """A reader of the answer's tokens like the one of the engine."""
    (submission,) = generation.plan.submissions
    at_start = submission.starts_text and submission.params.constraint is None
    tokenizer = generation.served.llm.llm.tokenizer
    return IncrementalDecoder(tokenizer, at_start=at_start, visible_ids=submission.visible_ids)


class Teller:
    """Tells pieces to the stream; scores of tokens go with their text, those of other parts are dropped."""

    def __init__(self, stream: ResponseStream, tokenizer: Tokenizer, decoder: IncrementalDecoder) -> None:
        self.stream = stream
        self._tokenizer = tokenizer
        self._scores = TextScores(tokenizer, decoder)

    def tell(self, piece: AnswerPart) -> list[Event]:
        self._scores.add(piece.logprobs)
        return [event for delta in piece.deltas for event in self.stream.push(delta, self._logprobs(delta))]

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if not isinstance(delta, ContentDelta):
            return []
        return chat_logprobs(self._tokenizer, self._scores.take(delta.at, delta.at + len(delta.text)))

    def ending(self, completion: Completion) -> tuple[FinishReason, ResponseUsage, int]:
        thoughts = self.stream.thoughts
        num_reasoning = len(self._tokenizer.encode(thoughts, add_special=False)) if thoughts else 0
        usage = ResponseUsage(completion.usage, min(num_reasoning, completion.usage.completion_tokens))
        return completion.finish_reason, usage, int(time.time())

    def failed(self, error: BaseException) -> bytes:
        failure = failure_of(error)
        return _written(self.stream.fail(failure.code or "server_error", failure.message))


async def _events(generation: Generation, reader: OutputStream, teller: Teller) -> AsyncIterator[bytes]:
    yield _written(teller.stream.start())
    async for piece in pieces(generation, reader):
        events = teller.tell(piece)
        if piece.completion is not None:
            events += teller.stream.end(*teller.ending(piece.completion))
        if events:
            yield _written(events)


def _written(events: Iterable[Event]) -> bytes:
    written = (f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
    return "".join(written).encode()
