"""POST /tokenize, /detokenize and /apply-template: what the model would read, without running it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.formats.strict_json import strings
from kvarn.server.api.schema import InvalidField, body_of, parse
from kvarn.server.api.system.tokens_schema import (
    ChatTextAnswer,
    ChatTextBody,
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
)
from kvarn.server.call import Call, Charged
from kvarn.server.chat.output.output_plan import OutputPlan
from kvarn.server.chat.prompt_limits import check_bounded, encode_bounded
from kvarn.server.http.disconnect import while_awaited
from kvarn.server.models.model_pool import ServedModel
from kvarn.tokenizer.chat.messages import ChatRequest
from kvarn.tokenizer.chat.template import encode_chat, render_chat

T = TypeVar("T")
router = APIRouter(tags=["tokens"])
COUNTED_ROOM = 16  # contexts: texts longer than the model's may be counted, within reason
_OF_TEXTS = frozenset({"add_special_tokens"})
_OF_CHATS = frozenset({"tools", "add_generation_prompt", "chat_template_kwargs"})


@router.post("/tokenize", response_model=TokenizeAnswer, openapi_extra=body_of(TokenizeBody))
async def tokenize(call: Charged) -> Response:
    """Cut a text or a conversation into tokens."""
    body = parse(TokenizeBody, await call.json(), call)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("prompt and messages are both missing or both given; give one of them", "prompt")
    idle = sorted(body.model_fields_set & (_OF_TEXTS if body.prompt is None else _OF_CHATS))
    if idle:
        given = "messages" if body.prompt is None else "prompt"
        raise InvalidField(f"{idle[0]} has no effect beside {given}; leave it out", idle[0])
    served = await _model(call, body.model)
    ids = await beside_the_loop(call, lambda: _encode(served, body))
    return await call.reply_beside(lambda: _tokenized(served, body, ids))


@router.post("/detokenize", response_model=DetokenizeAnswer, openapi_extra=body_of(DetokenizeBody))
async def detokenize(call: Charged) -> Response:
    """Turn tokens into text."""
    body = parse(DetokenizeBody, await call.json(), call)
    tokenizer = (await _model(call, body.model)).llm.llm.tokenizer
    decode = partial(tokenizer.decode, body.tokens, skip_special=body.skip_special_tokens)
    return call.reply({"prompt": await beside_the_loop(call, decode)})


@router.post("/apply-template", response_model=ChatTextAnswer, openapi_extra=body_of(ChatTextBody))
async def apply_template(call: Charged) -> Response:
    """Write a conversation with the model's own chat template."""
    body = parse(ChatTextBody, await call.json(), call)
    served = await _model(call, body.model)
    chat = await beside_the_loop(call, lambda: render_chat(served.llm.llm.tokenizer, _chat(served, body)))
    return call.reply({"prompt": chat.text})


async def beside_the_loop(call: Call, work: Callable[[], T]) -> T:
    """Run work in a thread, as long as somebody waits for it."""
    return await while_awaited(call, asyncio.to_thread(work))


async def _model(call: Call, name: str | None) -> ServedModel:
    return await call.use_model(call.state.shelf.default_id if name is None else name)


def _tokenized(served: ServedModel, body: TokenizeBody, ids: list[int]) -> dict[str, Any]:
    answer = {"count": len(ids), "max_model_len": served.card.context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [served.llm.llm.tokenizer.token_text(token_id) for token_id in ids]
    return answer


def _encode(served: ServedModel, body: TokenizeBody) -> list[int]:
    llm = served.llm.llm
    if body.prompt is not None:
        return encode_bounded(llm, body.prompt, "prompt", add_special=body.add_special_tokens, room=COUNTED_ROOM)
    chat = _chat(served, body)
    check_bounded(llm, list(strings([chat.messages, chat.tools])), "messages", room=COUNTED_ROOM)
    return encode_chat(llm.tokenizer, chat)


def _chat(served: ServedModel, body: ChatTextBody | TokenizeBody) -> ChatRequest:
    """The conversation as a chat would hand it to the template, tools included."""
    plan = OutputPlan.of(served.output_format, [tool.model_dump(exclude_none=True) for tool in body.tools or ()])
    messages = [message.model_dump(exclude_none=True, exclude_unset=True) for message in body.messages or ()]
    kwargs = body.chat_template_kwargs
    return ChatRequest.checked(plan.messages(messages), plan.template_tools, body.add_generation_prompt, kwargs)
