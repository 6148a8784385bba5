"""GET and DELETE /v1/requests/{id}: how far a running request is, and its end. Only for the key that sent it."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.schema import Answer
from kvarn.server.chat.generation import Generation
from kvarn.server.chat.generation_progress import GenerationPhase
from kvarn.server.dependencies import Called, RunningGenerations

router = APIRouter(tags=["requests"])


class RequestAnswer(Answer):
    """A request that has not ended; ids are those of x-request-id, or of the answer itself."""

    id: str
    object: Literal["request"]
    model: str
    phase: GenerationPhase
    priority: int
    elapsed_s: float
    prompt_tokens: int
    prompt_tokens_computed: int
    cached_tokens: int
    completion_tokens: int
    is_cancelled: bool


@router.get("/v1/requests/{request_id}", response_model=RequestAnswer)
async def progress(request: Called, generations: RunningGenerations, request_id: str) -> Response:
    """Say how far a request is."""
    return request.reply(_fields(generations.find(request.principal, request_id)))


@router.delete("/v1/requests/{request_id}", response_model=RequestAnswer)
async def cancel(request: Called, generations: RunningGenerations, request_id: str) -> Response:
    """End a request within one step: its own response carries what was said so far, finished by `cancelled`."""
    generation = generations.find(request.principal, request_id)
    generation.cancel()
    return request.reply(_fields(generation))


def _fields(generation: Generation) -> dict[str, Any]:
    usage, (computed, _) = generation.usage(), generation.prompt_progress
    return {
        "id": generation.request.id,
        "object": "request",
        "model": generation.model.id,
        "phase": generation.phase,
        "priority": generation.priority,
        "elapsed_s": round(time.monotonic() - generation.request.received_at, 3),
        "prompt_tokens": usage.prompt_tokens,
        "prompt_tokens_computed": computed,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "is_cancelled": generation.is_cancelled,
    }
