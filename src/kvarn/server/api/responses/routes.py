"""POST /v1/responses, without a memory: the whole conversation comes with each request."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.api.openai.translation import conversation_of
from kvarn.server.api.responses.echo import echo_of
from kvarn.server.api.responses.response_stream import ResponseStream
from kvarn.server.api.responses.response_writer import ResponseWriter
from kvarn.server.api.responses.schema import ResponsesAnswer, ResponsesBody
from kvarn.server.api.responses.translation import chat_fields
from kvarn.server.api.schema import EVENT_STREAM, body_of, parse
from kvarn.server.chat.delta_stream import answer_parts, whole_answer
from kvarn.server.chat.generation import Generation
from kvarn.server.chat.generation_plan import RequestOptions, chat_submission
from kvarn.server.chat.output.output_stream import OutputStream
from kvarn.server.dependencies import Charged, Models, RunningGenerations, Settings
from kvarn.server.http.sse import EventStreamResponse, StreamFormat
from kvarn.tokenizer.incremental import IncrementalDecoder

router = APIRouter(tags=["responses"])
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post("/v1/responses", response_model=ResponsesAnswer, responses=RESPONSES, openapi_extra=body_of(ResponsesBody))
async def create_response(
    request: Charged, models: Models, generations: RunningGenerations, settings: Settings
) -> Response:
    """Answer a conversation, whole or as a stream."""
    body = await request.body(ResponsesBody)
    chat = await request.on_body(lambda: conversation_of(parse(ChatBody, chat_fields(body)), settings.max_n))
    model = await request.use_model(models, body.model)
    plan = await request.on_body(lambda: chat.output_plan(model))
    prepare, options = partial(chat_submission, model, chat, plan), RequestOptions(limit_field="max_output_tokens")
    generation = await generations.begin(request, model, [prepare], options)
    stream = ResponseStream(echo_of(body, f"resp_{request.id}", model.id, int(time.time())))
    writer = ResponseWriter(stream, model.llm.llm.tokenizer, _decoder(generation))
    reader = generation.reader(plan)
    if body.stream:
        events, format = _events(generation, reader, writer), StreamFormat(writer.error_event)
        return EventStreamResponse(request, events, format, comment=generation.progress, ping_s=settings.ping_s)
    (completion,) = await generation.finish()
    return request.reply(writer.response(whole_answer(completion, reader)))


def _decoder(generation: Generation) -> IncrementalDecoder:
    """A reader of the answer's tokens like the one of the engine."""
    (submission,) = generation.plan.submissions
    at_start = submission.starts_text and submission.params.constraint is None
    tokenizer = generation.model.llm.llm.tokenizer
    return IncrementalDecoder(tokenizer, at_start=at_start, visible_ids=submission.visible_ids)


async def _events(generation: Generation, reader: OutputStream, writer: ResponseWriter) -> AsyncIterator[bytes]:
    yield writer.start()
    async for part in answer_parts(generation, reader):
        if written := writer.push(part):
            yield written
