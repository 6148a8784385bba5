"""POST /v1/messages and /v1/messages/count_tokens: the API of Anthropic's clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.errors import Cancelled
from kvarn.server.api.anthropic.errors import PATH, error_body
from kvarn.server.api.anthropic.message_stream import Event, MessageStream
from kvarn.server.api.anthropic.schema import CountTokensBody, MessageAnswer, MessagesBody, TokenCount
from kvarn.server.api.anthropic.translation import chat_fields, thinking_kwargs
from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.api.openai.translation import conversation_of
from kvarn.server.api.schema import EVENT_STREAM, body_of
from kvarn.server.api.validation import parse
from kvarn.server.chat.conversation import Conversation
from kvarn.server.chat.delta_stream import AnswerPart, answer_parts, whole_answer
from kvarn.server.chat.generation import Generation
from kvarn.server.chat.generation_plan import RequestOptions, chat_submission, prompt_ids_of
from kvarn.server.chat.output.harmony_stream import AnswerReader
from kvarn.server.chat.reasoning import with_effort
from kvarn.server.dependencies import Charged, Models, RunningGenerations, Settings
from kvarn.server.failures import Failure
from kvarn.server.http.sse import EventStreamResponse, StreamFormat
from kvarn.server.models.served_model import ServedModel
from kvarn.server.request_context import RequestContext
from kvarn.types import Completion, FinishReason

router = APIRouter(tags=["messages"])
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post(PATH, response_model=MessageAnswer, responses=RESPONSES, openapi_extra=body_of(MessagesBody))
async def create_message(
    request: Charged, models: Models, generations: RunningGenerations, settings: Settings
) -> Response:
    """Answer a conversation, whole or as a stream."""
    body = await request.body(MessagesBody)
    model = await request.use_model(models, body.model)
    chat = await request.on_body(lambda: _conversation(request, model, body, settings.max_n))
    plan = await request.on_body(lambda: chat.output_plan(model))
    prepare = partial(chat_submission, model, chat, plan)
    generation = await generations.begin(request, model, [prepare], RequestOptions(is_clamped=True))
    stream = MessageStream(f"msg_{request.id}", model.id, generation.usage().prompt_tokens)
    reader = generation.reader(plan)
    if body.stream:
        events = _events(generation, reader, stream)
        comment, is_over = generation.progress, generation.is_over
        return EventStreamResponse(
            request, events, STREAM_FORMAT, comment=comment, ping_s=settings.ping_s, is_over=is_over
        )
    (completion,) = await generation.finish()
    _push(stream, whole_answer(completion, reader))
    return request.reply(stream.message(*_ending(completion)))


@router.post(f"{PATH}/count_tokens", response_model=TokenCount, openapi_extra=body_of(CountTokensBody))
async def count_tokens(request: Charged, models: Models, settings: Settings) -> Response:
    """Count the tokens of a conversation as the model would read it."""
    body = await request.body(CountTokensBody)
    model = await request.use_model(models, body.model)
    chat = await request.on_body(lambda: _conversation(request, model, body, settings.max_n))
    plan = await request.on_body(lambda: chat.output_plan(model))
    return request.reply({"input_tokens": len(await request.in_thread(lambda: prompt_ids_of(model, chat, plan)))})


def _conversation(request: RequestContext, model: ServedModel, body: CountTokensBody, max_n: int) -> Conversation:
    template = model.llm.llm.tokenizer.chat_template or ""
    kwargs, warning = thinking_kwargs(body.thinking, template, can_think=model.output_format.reasoning is not None)
    if warning is not None:
        request.warn(warning)
    chat = conversation_of(parse(ChatBody, chat_fields(body, kwargs)), max_n)
    return with_effort(request, model, chat, "output_config.effort")


async def _events(generation: Generation, reader: AnswerReader, stream: MessageStream) -> AsyncIterator[bytes]:
    yield _write(stream.start())
    async for part in answer_parts(generation, reader):
        events = _push(stream, part)
        if part.completion is not None:
            events += stream.end(*_ending(part.completion))
        if events:
            yield _write(events)


def _push(stream: MessageStream, part: AnswerPart) -> list[Event]:
    return [event for delta in part.deltas for event in stream.push(delta)]


def _ending(completion: Completion) -> tuple[FinishReason, str | int | None, Any]:
    """Anthropic has no word for an answer that was cancelled: it is an error."""
    if completion.finish_reason is FinishReason.CANCELLED:
        raise Cancelled("the request was cancelled")
    return completion.finish_reason, completion.stop_match, completion.usage


def _write(events: Iterable[Event]) -> bytes:
    written = (f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
    return "".join(written).encode()


def _error_event(failure: Failure) -> bytes:
    return _write([error_body(failure)])


STREAM_FORMAT = StreamFormat(_error_event)
