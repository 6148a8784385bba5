"""POST /tokenize, /detokenize and /apply-template, GET /tokenizer_info: what the model reads, without running it."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvarn.formats.strict_json import strings
from kvarn.server.api.schema import InvalidField, body_of
from kvarn.server.api.system.tokens_schema import (
    ChatTextAnswer,
    ChatTextBody,
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfo,
)
from kvarn.server.chat.output.output_plan import OutputPlan
from kvarn.server.chat.prompt_limits import check_bounded, tools_at_fault
from kvarn.server.dependencies import Charged, Models
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.models.served_model import ServedModel
from kvarn.server.request_context import RequestContext
from kvarn.tokenizer.chat.template import ChatRequest, encode_chat, render_chat

router = APIRouter(tags=["tokens"])
COUNTED_ROOM = 16  # contexts: texts longer than the model's may be counted, within reason
MODEL_PARAMETER = {
    **{"name": "model", "in": "query", "required": False, "schema": {"type": "string"}},
    "description": "an id of /v1/models; without it the first",
}
_OF_TEXTS = frozenset({"add_special_tokens", "parse_special"})
_OF_CHATS = frozenset({"tools", "add_generation_prompt", "chat_template_kwargs"})


@router.post("/tokenize", response_model=TokenizeAnswer, openapi_extra=body_of(TokenizeBody))
async def tokenize(request: Charged, models: Models) -> Response:
    """Cut a text or a conversation into tokens."""
    body = await request.body(TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("prompt and messages are both missing or both given; give one of them", "prompt")
    idle = sorted(body.model_fields_set & (_OF_TEXTS if body.prompt is None else _OF_CHATS))
    if idle:
        given = "messages" if body.prompt is None else "prompt"
        raise InvalidField(f"{idle[0]} has no effect beside {given}; leave it out", idle[0])
    model = await _model(request, models, body.model)
    ids = await request.in_thread(lambda: _encode(model, body))
    return await request.reply_from_thread(lambda: _tokenized(model, body, ids))


@router.post("/detokenize", response_model=DetokenizeAnswer, openapi_extra=body_of(DetokenizeBody))
async def detokenize(request: Charged, models: Models) -> Response:
    """Turn tokens into text."""
    body = await request.body(DetokenizeBody)
    llm = (await _model(request, models, body.model)).llm.llm
    if len(body.tokens) > (limit := COUNTED_ROOM * llm.context):
        raise InvalidField(
            f"tokens has {len(body.tokens):,} ids; {COUNTED_ROOM} times the context, {limit:,}, are allowed; send less",
            "tokens",
            "context_length_exceeded",
        )
    decode = partial(llm.tokenizer.decode, body.tokens, skip_special=body.skip_special_tokens)
    return await request.reply_from_thread(lambda: {"prompt": decode()})


@router.post("/apply-template", response_model=ChatTextAnswer, openapi_extra=body_of(ChatTextBody))
async def apply_template(request: Charged, models: Models) -> Response:
    """Write a conversation with the model's own chat template."""
    body = await request.body(ChatTextBody)
    model = await _model(request, models, body.model)
    tokenizer = model.llm.llm.tokenizer
    return await request.reply_from_thread(lambda: {"prompt": render_chat(tokenizer, _chat(model, body)).text})


@router.get("/tokenizer_info", response_model=TokenizerInfo, openapi_extra={"parameters": [MODEL_PARAMETER]})
async def tokenizer_info(http: Request, request: Charged, models: Models) -> Response:
    """Tell what begins and ends a text, and the chat template, by the names of a Hugging Face tokenizer_config.json."""
    model = await _model(request, models, http.query_params.get("model"))
    tokenizer = model.llm.llm.tokenizer
    return request.reply(
        {
            "tokenizer_class": "kvarn",
            "bos_token": tokenizer.bos_text or None,
            "eos_token": tokenizer.eos_text or None,
            "pad_token": None,
            "add_bos_token": tokenizer.bos_id in tokenizer.prefix_ids,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": model.entry.context,
            "chat_template": tokenizer.chat_template,
        }
    )


async def _model(request: RequestContext, models: ModelPool, name: str | None) -> ServedModel:
    return await request.use_model(models, models.default_id if name is None else name)


def _tokenized(model: ServedModel, body: TokenizeBody, ids: list[int]) -> dict[str, Any]:
    answer = {"count": len(ids), "max_model_len": model.entry.context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [model.llm.llm.tokenizer.token_text(token_id) for token_id in ids]
    return answer


def _encode(model: ServedModel, body: TokenizeBody) -> list[int]:
    llm = model.llm.llm
    if body.prompt is not None:
        check_bounded(llm, [body.prompt], "prompt", room=COUNTED_ROOM)
        is_special = body.prompt in (llm.tokenizer.bos_text, llm.tokenizer.eos_text)  # its id is asked for
        parses = body.parse_special or (is_special and not body.add_special_tokens)
        return llm.tokenizer.encode(body.prompt, add_special=body.add_special_tokens, parse_special=parses)
    chat = _chat(model, body)
    with tools_at_fault(llm, chat.messages, chat.tools or (), room=COUNTED_ROOM):
        check_bounded(llm, list(strings([chat.messages, chat.tools])), "messages", room=COUNTED_ROOM)
    return encode_chat(llm.tokenizer, chat)


def _chat(model: ServedModel, body: ChatTextBody | TokenizeBody) -> ChatRequest:
    """The conversation as a chat would hand it to the template, tools included."""
    plan = OutputPlan.of(model.output_format, [tool.model_dump(exclude_none=True) for tool in body.tools or ()])
    messages = [message.model_dump(exclude_none=True, exclude_unset=True) for message in body.messages or ()]
    kwargs = body.chat_template_kwargs
    return ChatRequest.checked(plan.messages(messages), plan.template_tools, body.add_generation_prompt, kwargs)
