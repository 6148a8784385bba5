"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.openai.chat_schema import ChatAnswer, ChatBody
from kvarn.server.api.openai.chat_stream import chat_events
from kvarn.server.api.openai.chat_writer import ChatWriter
from kvarn.server.api.openai.envelope import Envelope
from kvarn.server.api.schema import EVENT_STREAM, body_of, parse
from kvarn.server.call import Charged
from kvarn.server.chat.conversation import chat_submission, conversation_of, wishes_of
from kvarn.server.chat.generation import begin
from kvarn.server.collections.chat_retrieval import after_sources, ground, retrieval_fields, with_messages
from kvarn.server.http.sse import stream_response

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
        heading = Envelope.make(call, served, "chatcmpl-", "chat.completion.chunk")
        has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        events = chat_events(generation, heading, chat, has_usage=has_usage)
        return stream_response(call, events if grounded is None else after_sources(events, heading, grounded))
    heading = Envelope.make(call, served, "chatcmpl-", "chat.completion")
    (completion,) = await generation.finish()

    def whole() -> dict[str, Any]:
        answer = ChatWriter(heading, generation, chat).answer(completion)
        if grounded is not None:
            said = " ".join(one.text for one in (completion, *completion.alternatives))
            answer["retrieval"] = retrieval_fields(grounded, said)
        return answer

    return await call.reply_beside(whole) if generation.plan.has_scores else call.reply(whole())
