"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.openai.chat_schema import ChatAnswer, ChatBody
from kvarn.server.api.openai.chat_stream import STREAM_FORMAT, chat_events
from kvarn.server.api.openai.chat_writer import ChatWriter
from kvarn.server.api.openai.envelope import Envelope
from kvarn.server.api.openai.sampling_schema import lora_factors
from kvarn.server.api.openai.translation import conversation_of, options_of
from kvarn.server.api.schema import EVENT_STREAM, body_of
from kvarn.server.chat.generation_plan import chat_submission
from kvarn.server.chat.reasoning import with_effort
from kvarn.server.collections.chat_retrieval import (
    attribution,
    between_sources_and_support,
    ground,
    grounded_chat,
    retrieval_fields,
)
from kvarn.server.dependencies import Charged, Models, Retrieval, RunningGenerations, Settings
from kvarn.server.http.sse import EventStreamResponse

if TYPE_CHECKING:
    from kvarn.citations.types import SentenceSupport
    from kvarn.server.chat.generation import Generation
    from kvarn.server.request_context import RequestContext

router = APIRouter(tags=["chat"])
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=RESPONSES, openapi_extra=body_of(ChatBody))
async def chat_completions(
    request: Charged, models: Models, generations: RunningGenerations, retrieval: Retrieval, settings: Settings
) -> Response:
    """Answer a conversation, whole or as a stream."""
    body = await request.body(ChatBody)
    chat = await request.on_body(lambda: conversation_of(body, settings.max_n))
    model = await request.use_model(models, body.model, lora_factors(body.lora))
    chat = with_effort(request, model, chat, "reasoning_effort")
    grounded, has_passages = None, False
    if body.retrieval is not None:
        has_passages = body.retrieval.return_passages
        grounded = await ground(request, retrieval, model, chat, body)
        chat = grounded_chat(chat, grounded, model)
    plan = await request.on_body(lambda: chat.output_plan(model))
    generation = await generations.begin(
        request, model, [partial(chat_submission, model, chat, plan)], options_of(body)
    )
    envelope = Envelope.of(generation, "chatcmpl-", "chat.completion.chunk" if body.stream else "chat.completion")
    writer = ChatWriter(envelope, generation, plan)

    async def attribute() -> list[tuple[SentenceSupport, ...]]:
        assert grounded is not None
        (completion,) = await generation.finish()
        return await attribution(request, retrieval, grounded, writer.contents(completion))

    if body.stream:
        events = chat_events(generation, envelope, plan, body.stream_options)
        if grounded is not None:
            events = between_sources_and_support(events, envelope, grounded, attribute, has_passages=has_passages)
        return _streamed(request, generation, events, settings.ping_s, is_grounded=grounded is not None)
    (completion,) = await generation.finish()
    added = {}
    if grounded is not None:
        added["retrieval"] = retrieval_fields(grounded, await attribute(), has_passages=has_passages)

    def answer() -> dict[str, Any]:
        return writer.answer(completion) | added

    return await request.reply_from_thread(answer) if generation.plan.has_scores else request.reply(answer())


def _streamed(
    request: RequestContext, generation: Generation, events: AsyncIterator[bytes], ping_s: float, *, is_grounded: bool
) -> Response:
    """Behind a grounded answer comes what supports it, for which the answer does not wait."""
    is_over = None if is_grounded else generation.is_over
    return EventStreamResponse(
        request, events, STREAM_FORMAT, comment=generation.progress, ping_s=ping_s, is_over=is_over
    )
