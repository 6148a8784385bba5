"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.call import Charged
from kvarn.server.generation import begin
from kvarn.server.openai.chat import ChatWriter
from kvarn.server.openai.chat_stream import chat_events
from kvarn.server.openai.heading import Heading
from kvarn.server.retrieving import after_sources, ground, retrieval_fields, with_messages
from kvarn.server.schema.chat import ChatAnswer, ChatBody
from kvarn.server.schema.common import EVENT_STREAM, body_of, parse
from kvarn.server.sse import stream_response
from kvarn.server.translate import chat_submission, conversation_of, wishes_of

router = APIRouter(tags=["chat"])
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=RESPONSES, openapi_extra=body_of(ChatBody))
async def chat_completions(call: Charged) -> Response:
    """Answer a conversation, whole or as a stream."""
    body = parse(ChatBody, await call.json(), call)
    chat = conversation_of(body, call.state.config)
    served = await call.use_model(body.model)
    grounded = None
    if body.retrieval is not None:
        grounded = await ground(call, served, chat, body)
        chat = with_messages(chat, grounded)
    generation = await begin(call, served, lambda: [chat_submission(served, chat)], wishes_of(body))
    if body.stream:
        heading = Heading.make(call, served, "chatcmpl-", "chat.completion.chunk")
        has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        events = chat_events(generation, heading, chat, has_usage=has_usage)
        return stream_response(call, events if grounded is None else after_sources(events, heading, grounded))
    heading = Heading.make(call, served, "chatcmpl-", "chat.completion")
    (completion,) = await generation.finish()

    def whole() -> dict[str, Any]:
        answer = ChatWriter(heading, generation, chat).answer(completion)
        if grounded is not None:
            said = " ".join(one.text for one in (completion, *completion.alternatives))
            answer["retrieval"] = retrieval_fields(grounded, said)
        return answer

    return await call.reply_beside(whole) if generation.plan.has_scores else call.reply(whole())
