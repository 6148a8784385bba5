"""POST /v1/responses: the conversation comes with the request, or continues a response that is stored."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.observe.logs import with_fields
from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.api.openai.translation import conversation_of
from kvarn.server.api.responses.continuation import read_items, refers, response_id, with_stored, written_items
from kvarn.server.api.responses.echo import echo_of
from kvarn.server.api.responses.response_store import ResponseStore, StoredResponse
from kvarn.server.api.responses.response_stream import ResponseStream
from kvarn.server.api.responses.response_writer import ResponseWriter, write_events
from kvarn.server.api.responses.schema import ResponsesAnswer, ResponsesBody
from kvarn.server.api.responses.translation import absent_tools, chat_fields
from kvarn.server.api.schema import EVENT_STREAM, body_of
from kvarn.server.api.validation import parse
from kvarn.server.chat.delta_stream import answer_parts, whole_answer
from kvarn.server.chat.generation import Generation
from kvarn.server.chat.generation_plan import RequestOptions, chat_submission
from kvarn.server.chat.output.harmony_stream import AnswerReader
from kvarn.server.chat.reasoning import with_effort
from kvarn.server.dependencies import Charged, Models, Responses, RunningGenerations, Settings
from kvarn.server.http.json_body import write_json
from kvarn.server.http.sse import EventStreamResponse, StreamFormat
from kvarn.server.request_context import RequestContext
from kvarn.tokenizer.incremental import IncrementalDecoder

log = logging.getLogger("kvarn.server")
Keep = Callable[[dict[str, Any]], Awaitable[None]]  # stores a response
router = APIRouter(tags=["responses"])
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post("/v1/responses", response_model=ResponsesAnswer, responses=RESPONSES, openapi_extra=body_of(ResponsesBody))
async def create_response(
    request: Charged, models: Models, generations: RunningGenerations, responses: Responses, settings: Settings
) -> Response:
    """Answer a conversation, whole or as a stream."""
    body = await request.body(ResponsesBody)
    is_continued = refers(body)
    body, earlier = await _with_stored(request, responses, body)
    run = request.in_thread if is_continued else request.on_body  # its size is not that of the body
    chat = await run(lambda: conversation_of(parse(ChatBody, chat_fields(body, read_items(earlier))), settings.max_n))
    model = await request.use_model(models, body.model)
    chat = with_effort(request, model, chat, "reasoning.effort")
    if absent := absent_tools(body):
        request.warn(f"tools not offered to the model: {', '.join(absent)}")
    plan = await request.on_body(lambda: chat.output_plan(model))
    prepare, options = partial(chat_submission, model, chat, plan), RequestOptions(limit_field="max_output_tokens")
    generation = await generations.begin(request, model, [prepare], options)
    stream = ResponseStream(echo_of(body, response_id(request.id), model.id, int(time.time())))
    writer = ResponseWriter(stream, model.llm.llm.tokenizer, _decoder(generation))
    reader = generation.reader(plan)
    keep = partial(_keep, request, responses, body, earlier)
    if body.stream:
        events, format = _events(generation, reader, writer, keep), StreamFormat(writer.error_event)
        comment, is_over = generation.progress, generation.is_over
        return EventStreamResponse(request, events, format, comment=comment, ping_s=settings.ping_s, is_over=is_over)
    (completion,) = await generation.finish()
    response = writer.response(whole_answer(completion, reader))
    await keep(response)
    # It repeats tools and instructions, so that it is as large as the body.
    return request.reply_written(await request.on_body(lambda: write_json(response, in_pieces=True)))


async def _with_stored(
    request: RequestContext, responses: ResponseStore, body: ResponsesBody
) -> tuple[ResponsesBody, list[dict[str, Any]]]:
    """The body with what it refers to, and the conversation it continues."""
    if not refers(body):
        return body, []
    num_bytes = 0

    def find(id: str) -> StoredResponse | None:
        nonlocal num_bytes
        written = responses.get_written(request.principal.fingerprint, id)
        num_bytes += 0 if written is None else written.num_bytes
        return None if written is None else written.parsed(id)

    found = await request.in_thread(lambda: with_stored(body, find))
    await request.expect(num_bytes)  # it is read like what the body brings
    return found


async def _keep(
    request: RequestContext,
    responses: ResponseStore,
    body: ResponsesBody,
    earlier: list[dict[str, Any]],
    response: dict[str, Any],
) -> None:
    """Store a response that ended, unless the client does not want it; one that cannot be stored says so."""
    if not response["store"]:
        return

    def store() -> bool:
        items = [*earlier, *written_items(body, request.id)]
        return responses.put(request.principal.fingerprint, StoredResponse(response["id"], response, items))

    try:
        response["store"] = await asyncio.to_thread(store)
    except sqlite3.Error as error:
        log.error("a response was not stored", extra=with_fields(error=type(error).__name__))
        response["store"] = False


def _decoder(generation: Generation) -> IncrementalDecoder:
    """A reader of the answer's tokens like the one of the engine."""
    (submission,) = generation.plan.submissions
    at_start = submission.starts_text and submission.params.constraint is None
    tokenizer = generation.model.llm.llm.tokenizer
    return IncrementalDecoder(tokenizer, at_start=at_start, visible_ids=submission.visible_ids)


async def _events(
    generation: Generation, reader: AnswerReader, writer: ResponseWriter, keep: Keep
) -> AsyncIterator[bytes]:
    """A response is stored before its last event is sent: the client may continue it at once."""
    on_body = generation.request.on_body  # the first and the last repeat what the body says
    yield await on_body(lambda: write_events(writer.start()))
    async for part in answer_parts(generation, reader):
        events = writer.events(part)
        if part.completion is None:
            if events:
                yield write_events(events)
            continue
        events += writer.end(part.completion)
        await keep(events[-1]["response"])
        yield await on_body(partial(write_events, events))
