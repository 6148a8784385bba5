"""POST /infill as llama-server has it: a model with fill-in-the-middle tokens writes what fits between two texts."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.llama_server.infill_schema import InfillAnswer, InfillBody
from kvarn.server.api.llama_server.infill_translation import infill_params, prepared_infill
from kvarn.server.api.llama_server.infill_writer import InfillWriter, event_bytes
from kvarn.server.api.openai.errors import error_body
from kvarn.server.api.openai.sampling_schema import lora_factors
from kvarn.server.api.schema import EVENT_STREAM, body_of
from kvarn.server.chat.generation_plan import RequestOptions
from kvarn.server.dependencies import Charged, Models, RunningGenerations, Settings
from kvarn.server.failures import Failure
from kvarn.server.http.sse import EventStreamResponse, StreamFormat

router = APIRouter(tags=["completions"])
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}
OPTIONS = RequestOptions(limit_field="n_predict", is_clamped=True)  # llama-server writes up to the end of the context


@router.post(
    "/infill",
    response_model=InfillAnswer | list[InfillAnswer],
    responses=RESPONSES,
    openapi_extra=body_of(InfillBody),
)
async def infill(request: Charged, models: Models, generations: RunningGenerations, settings: Settings) -> Response:
    """Write the text between input_prefix and input_suffix, whole or as a stream."""
    body = await request.body(InfillBody)
    params = infill_params(body, settings.max_n)
    name = body.model or models.default_id  # llama.vim sends an empty one
    model = await request.use_model(models, name, lora_factors(body.lora))
    generation = await generations.begin(request, model, [partial(prepared_infill, model, body, params)], OPTIONS)
    if "infill" in (body.samplers or ()):
        request.warn("ignored: the sampler infill")
    writer = InfillWriter(generation, body)
    if body.stream:
        format = StreamFormat(_error_event)
        return EventStreamResponse(
            request, writer.events(), format, comment=generation.progress, ping_s=settings.ping_s
        )
    await writer.finish()
    if generation.plan.has_scores:
        return await request.reply_from_thread(writer.answer)
    return request.reply(writer.answer())


def _error_event(failure: Failure) -> bytes:
    return event_bytes(error_body(failure))
