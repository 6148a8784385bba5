"""POST /v1/messages and /v1/messages/count_tokens: the API of Anthropic's clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.errors import Cancelled
from kvarn.server.api.anthropic.message_stream import Event, MessageStream
from kvarn.server.api.anthropic.schema import CountTokensBody, MessageAnswer, MessagesBody, TokenCount
from kvarn.server.api.anthropic.translation import chat_fields, thinking_kwargs
from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.api.schema import EVENT_STREAM, body_of, parse
from kvarn.server.api.system.tokens import beside_the_loop
from kvarn.server.call import Call, Charged
from kvarn.server.chat.conversation import Conversation, chat_submission, conversation_of
from kvarn.server.chat.delta_stream import AnswerPart, pieces, reader_of, whole
from kvarn.server.chat.generation import Generation, begin
from kvarn.server.chat.output.output_stream import OutputStream
from kvarn.server.failures import failure_body
from kvarn.server.http.sse import stream_response
from kvarn.server.models.model_pool import ServedModel
from kvarn.types import Completion, FinishReason

router = APIRouter(tags=["messages"])
PATH = "/v1/messages"
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post(PATH, response_model=MessageAnswer, responses=RESPONSES, openapi_extra=body_of(MessagesBody))
async def create_message(call: Charged) -> Response:
    """Answer a conversation, whole or as a stream."""
    body = parse(MessagesBody, await call.json(), call)
    served = await call.use_model(body.model)
    chat = _conversation(call, served, body)
    generation = await begin(call, served, lambda: [chat_submission(served, chat)])
    stream = MessageStream(f"msg_{call.id}", served.id, generation.usage().prompt_tokens)
    reader = reader_of(generation, chat)
    if body.stream:
        return stream_response(call, _events(generation, reader, stream), error_event=_error_event, done=b"")
    (completion,) = await generation.finish()
    _push(stream, whole(completion, reader))
    return call.reply(stream.whole(*_ending(completion)))


@router.post(f"{PATH}/count_tokens", response_model=TokenCount, openapi_extra=body_of(CountTokensBody))
async def count_tokens(call: Charged) -> Response:
    """Count the tokens of a conversation as the model would read it."""
    body = parse(CountTokensBody, await call.json(), call)
    served = await call.use_model(body.model)
    chat = _conversation(call, served, body)
    submission = await beside_the_loop(call, lambda: chat_submission(served, chat))
    return call.reply({"input_tokens": len(submission.prompt_ids)})


def _conversation(call: Call, served: ServedModel, body: CountTokensBody) -> Conversation:
    template = served.llm.llm.tokenizer.chat_template or ""
    kwargs = thinking_kwargs(body.thinking, template, can_think=served.output_format.reasoning is not None)
    return conversation_of(parse(ChatBody, chat_fields(body, kwargs), call), call.state.config)


async def _events(generation: Generation, reader: OutputStream, stream: MessageStream) -> AsyncIterator[bytes]:
    yield _written(stream.start())
    async for piece in pieces(generation, reader):
        events = _push(stream, piece)
        if piece.completion is not None:
            events += stream.end(*_ending(piece.completion))
        if events:
            yield _written(events)


def _push(stream: MessageStream, piece: AnswerPart) -> list[Event]:
    return [event for delta in piece.deltas for event in stream.push(delta)]


def _ending(completion: Completion) -> tuple[FinishReason, str | int | None, Any]:
    """Anthropic has no word for an answer that was cancelled: it is an error."""
    if completion.finish_reason is FinishReason.CANCELLED:
        raise Cancelled("the request was cancelled")
    return completion.finish_reason, completion.stop_match, completion.usage


def _written(events: Iterable[Event]) -> bytes:
    written = (f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
    return "".join(written).encode()


def _error_event(error: BaseException) -> bytes:
    return b"event: error\ndata: " + failure_body(error, PATH) + b"\n\n"
