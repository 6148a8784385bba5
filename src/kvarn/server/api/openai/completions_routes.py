"""POST /v1/completions: texts and token ids are continued as they are, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.engine.submission import Submission
from kvarn.server.api.openai.completions_schema import CompletionAnswer, CompletionBody
from kvarn.server.api.openai.completions_writer import TextWriter, text_events
from kvarn.server.api.openai.envelope import Envelope
from kvarn.server.api.schema import EVENT_STREAM, body_of, parse
from kvarn.server.call import Charged
from kvarn.server.chat.conversation import constraint_field, text_params, text_submission, wishes_of
from kvarn.server.chat.generation import Generation, begin
from kvarn.server.http.sse import stream_response

router = APIRouter(tags=["completions"])
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": EVENT_STREAM}}


@router.post(
    "/v1/completions", response_model=CompletionAnswer, responses=RESPONSES, openapi_extra=body_of(CompletionBody)
)
async def completions(call: Charged) -> Response:
    """Continue one prompt or several, whole or as a stream."""
    body = parse(CompletionBody, await call.json(), call)
    params = text_params(body, call.state.config)
    served = await call.use_model(body.model)

    def prepare() -> list[Submission]:
        field = constraint_field(body)
        return [text_submission(served, prompt, params, field) for prompt in body.prompt]

    generation = await begin(call, served, prepare, wishes_of(body))
    heading = Envelope.make(call, served, "cmpl-", "text_completion")
    prompts = _as_read(generation, body)
    if body.stream:
        return stream_response(call, text_events(generation, heading, body, prompts))
    results = await generation.finish()
    writer = TextWriter(heading, served.llm.llm.tokenizer, body, prompts)
    if generation.plan.has_scores:
        return await call.reply_beside(lambda: writer.answer(results, generation.usage()))
    return call.reply(writer.answer(results, generation.usage()))


def _as_read(generation: Generation, body: CompletionBody) -> list[tuple[str, Sequence[int]]]:
    """Text and ids of each prompt, as they are echoed; ids are shown as the text they stand for."""
    ids = [submission.prompt_ids for submission in generation.plan.submissions]
    if not body.echo:
        return [("", one) for one in ids]
    tokenizer = generation.served.llm.llm.tokenizer
    texts = [one if isinstance(one, str) else tokenizer.decode(one) for one in body.prompt]
    return list(zip(texts, ids, strict=True))
