"""POST /infill as llama-server has it: a model with fill-in-the-middle tokens writes what fits between two texts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.llama_server.infill_schema import InfillAnswer, InfillBody
from kvarn.server.api.openai.errors import error_body
from kvarn.server.api.schema import EVENT_STREAM, body_of
from kvarn.server.chat.generation import Generation
from kvarn.server.chat.generation_plan import RequestOptions, infill_submission
from kvarn.server.dependencies import Charged, Models, RunningGenerations, Settings
from kvarn.server.failures import Failure
from kvarn.server.http.sse import EventStreamResponse, StreamFormat
from kvarn.types import Completion, FinishReason

router = APIRouter(tags=["completions"])
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post("/infill", response_model=InfillAnswer, responses=RESPONSES, openapi_extra=body_of(InfillBody))
async def infill(request: Charged, models: Models, generations: RunningGenerations, settings: Settings) -> Response:
    """Write the text between input_prefix and input_suffix, whole or as a stream."""
    body = await request.body(InfillBody)
    params = body.params()
    model = await request.use_model(models, models.default_id if body.model is None else body.model)
    prepare = partial(infill_submission, model, body.infill(), params, field="input_suffix")
    generation = await generations.begin(request, model, [prepare], RequestOptions(limit_field="n_predict"))
    if body.stream:
        events, format = _events(generation), StreamFormat(_error_event)
        return EventStreamResponse(request, events, format, comment=generation.progress, ping_s=settings.ping_s)
    (completion,) = await generation.finish()
    return request.reply(_answer(completion, model.id) | {"content": completion.text})


async def _events(generation: Generation) -> AsyncIterator[bytes]:
    async for batch in generation.batches():
        tokens = [event for _, event in batch]
        text = "".join(token.text for token in tokens)
        if text:
            yield _event({"index": 0, "content": text, "stop": False})
        if (completion := tokens[-1].completion) is not None and completion.finish_reason is not FinishReason.DEADLINE:
            yield _event(_answer(completion, generation.model.id))


def _answer(completion: Completion, model: str) -> dict[str, Any]:
    usage, timings = completion.usage, completion.timings
    return {
        "index": 0,
        "content": "",
        "stop": True,
        "model": model,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
        "truncated": False,
        "stop_type": _stop_type(completion),
        "stopping_word": completion.stop_match if isinstance(completion.stop_match, str) else "",
        "timings": {
            "cache_n": usage.cached_tokens,
            "prompt_n": usage.prompt_tokens - usage.cached_tokens,
            "prompt_ms": round(timings.prefill_s * 1e3, 3),
            "predicted_n": usage.completion_tokens,
            "predicted_ms": round(timings.decode_s * 1e3, 3),
        },
    }


def _stop_type(completion: Completion) -> str:
    if completion.finish_reason is FinishReason.STOP:
        return "word" if isinstance(completion.stop_match, str) else "eos"
    return "limit" if completion.finish_reason is FinishReason.LENGTH else "none"


def _event(fields: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()


def _error_event(failure: Failure) -> bytes:
    return _event(error_body(failure))
