"""POST /v1/completions: texts and token ids are continued as they are, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.fill.suffix_filling import SuffixFilling
from kvarn.server.api.openai.chat_stream import STREAM_FORMAT
from kvarn.server.api.openai.completions_schema import CompletionAnswer, CompletionBody
from kvarn.server.api.openai.completions_writer import TextWriter, text_events
from kvarn.server.api.openai.envelope import Envelope
from kvarn.server.api.openai.sampling_schema import lora_factors
from kvarn.server.api.openai.translation import constraint_field, options_of, text_params
from kvarn.server.api.schema import EVENT_STREAM, InvalidField, body_of
from kvarn.server.chat.generation import Generation
from kvarn.server.chat.generation_plan import Prepare, check_answers, infill_submission, text_submission
from kvarn.server.dependencies import Charged, Models, RunningGenerations, Settings
from kvarn.server.http.sse import EventStreamResponse
from kvarn.server.models.served_model import ServedModel
from kvarn.tokenizer.fim import Infill
from kvarn.types import SamplingParams

router = APIRouter(tags=["completions"])
# Prompts that take no longer to check, or to encode, than the way through another thread: they stay in the event loop.
SHORT_IDS, SHORT_TEXT = 2048, 256
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post(
    "/v1/completions", response_model=CompletionAnswer, responses=RESPONSES, openapi_extra=body_of(CompletionBody)
)
async def completions(
    request: Charged, models: Models, generations: RunningGenerations, settings: Settings
) -> Response:
    """Continue one prompt or several, whole or as a stream."""
    body = await request.body(CompletionBody)
    params = text_params(body, settings.max_n)
    check_answers(len(body.prompt) * params.n, settings.queue_limit)
    model = await request.use_model(models, body.model, lora_factors(body.lora))
    if body.suffix and model.entry.can_fill:
        filling = SuffixFilling(model, body, params)
        prepare = [one.submission for one in filling.middles]
        generation = await generations.begin(request, model, prepare, options_of(body))
        if not body.stream:
            return request.reply(await filling.answer(generation))
        events, progress = filling.events(generation), generation.progress
        return EventStreamResponse(request, events, STREAM_FORMAT, comment=progress, ping_s=settings.ping_s)
    prepare = [prepared_text(model, prompt, params, body) for prompt in body.prompt]
    options = replace(options_of(body), is_short=_is_short(body))
    generation = await generations.begin(request, model, prepare, options)
    envelope = Envelope.of(generation, "cmpl-", "text_completion")
    prompts = await request.on_body(lambda: _as_read(generation, body))
    if body.stream:
        events = text_events(generation, envelope, body, prompts)
        comment, is_over = generation.progress, generation.is_over
        return EventStreamResponse(
            request, events, STREAM_FORMAT, comment=comment, ping_s=settings.ping_s, is_over=is_over
        )
    results = await generation.finish()
    writer = TextWriter(envelope, model.llm.llm.tokenizer, body, prompts)
    if generation.plan.has_scores or body.echo:  # as large as the body
        return await request.reply_from_thread(lambda: writer.answer(results, generation.usage()))
    return request.reply(writer.answer(results, generation.usage()))


def _is_short(body: CompletionBody) -> bool:
    has_pins = body.diffusion is not None and bool(body.diffusion.pinned)  # texts, perhaps
    is_plain = not body.suffix and not has_pins and constraint_field(body) is None
    limit = SHORT_TEXT if isinstance(body.prompt[0], str) else SHORT_IDS
    return is_plain and sum(map(len, body.prompt)) <= limit


def prepared_text(model: ServedModel, prompt: str | list[int], params: SamplingParams, body: CompletionBody) -> Prepare:
    """What is sent with a suffix is filled in, everything else continued."""
    field = constraint_field(body)
    if body.suffix:
        if not isinstance(prompt, str):
            raise InvalidField("suffix is given with token ids as a prompt; give the prompt as text", "suffix")
        return partial(infill_submission, model, Infill(prompt, body.suffix), params, field, field="suffix")
    return partial(text_submission, model, prompt, params, field, parse_special=bool(body.parse_special))


def _as_read(generation: Generation, body: CompletionBody) -> list[tuple[str, Sequence[int]]]:
    """Text and ids of each prompt, as they are echoed; ids are shown as the text they stand for."""
    ids = [submission.prompt_ids for submission in generation.plan.submissions]
    if not body.echo:
        return [("", one) for one in ids]
    tokenizer = generation.model.llm.llm.tokenizer
    texts = [one if isinstance(one, str) else tokenizer.decode(one) for one in body.prompt]
    return list(zip(texts, ids, strict=True))
