"""POST /api/chat and /api/generate: answers as Ollama's clients read them, in lines of JSON unless stream is false."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.fill.suffix_filling import Middle
from kvarn.server.api.ollama.answer_schema import GenerateAnswer, OllamaChatAnswer
from kvarn.server.api.ollama.errors import PREFIX
from kvarn.server.api.ollama.schema import GenerateBody, OllamaChatBody
from kvarn.server.api.ollama.translation import (
    chat_fields,
    chat_messages,
    check_context,
    model_id,
    prompt_messages,
    text_fields,
    thinking_kwargs,
)
from kvarn.server.api.ollama.writer import (
    NDJSON,
    LineWriter,
    Shape,
    empty_answer,
    line_bytes,
    line_stream,
    stream_format,
)
from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.api.openai.completions_routes import prepared_text
from kvarn.server.api.openai.completions_schema import CompletionBody
from kvarn.server.api.openai.translation import conversation_of, text_params
from kvarn.server.api.schema import InvalidField, body_of
from kvarn.server.api.validation import parse
from kvarn.server.chat.delta_stream import AnswerPart, PlainReader, answer_parts, whole_answer
from kvarn.server.chat.generation import Generation, Generations
from kvarn.server.chat.generation_plan import RequestOptions, chat_submission
from kvarn.server.chat.output.deltas import ContentDelta
from kvarn.server.dependencies import Charged, Models, RunningGenerations, Settings
from kvarn.server.http.sse import EventStreamResponse
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.models.served_model import ServedModel
from kvarn.server.process.settings import ServerConfig
from kvarn.server.request_context import RequestContext
from kvarn.types import Completion

router = APIRouter(tags=["ollama"])
LINES: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {}}}}
OPTIONS = RequestOptions(limit_field="num_predict", is_clamped=True)  # Ollama writes up to the end of the context


@dataclass(frozen=True, slots=True)
class _OllamaTurn:
    """One request for an answer, its model loaded."""

    request: RequestContext
    body: OllamaChatBody | GenerateBody
    model: ServedModel
    writer: LineWriter
    settings: ServerConfig

    async def chat(self, generations: Generations, messages: list[dict[str, Any]]) -> Response:
        """Answer a conversation, written with the model's template."""
        request, model = self.request, self.model
        fields = chat_fields(self.body, messages) | self._thinking()
        chat = await request.on_body(lambda: conversation_of(parse(ChatBody, fields), self.settings.max_n))
        plan = await request.on_body(lambda: chat.output_plan(model))
        generation = await generations.begin(request, model, [partial(chat_submission, model, chat, plan)], OPTIONS)
        reader = generation.reader(plan)
        return await self._answer(
            generation, answer_parts(generation, reader), lambda completion: whole_answer(completion, reader)
        )

    async def text(self, generations: Generations, body: GenerateBody) -> Response:
        """Continue a prompt as it is, or fill in what stands before a suffix."""
        for name in ("system", "think"):
            if getattr(body, name):
                raise InvalidField(f"{name} is given, and the prompt is read without a template; leave it out", name)
        text = parse(CompletionBody, text_fields(body))
        params = text_params(text, self.settings.max_n).replace(max_tokens=text.max_tokens)
        if body.suffix and self.model.entry.can_fill:
            return await self._middle(generations, Middle(self.model, body.prompt, body.suffix, params))
        prepare = prepared_text(self.model, body.prompt, params, text)
        generation = await generations.begin(self.request, self.model, [prepare], OPTIONS)
        reader = PlainReader()
        return await self._answer(
            generation, answer_parts(generation, reader), lambda completion: whole_answer(completion, reader)
        )

    async def _middle(self, generations: Generations, middle: Middle) -> Response:
        """What a diffusion model writes between two texts: all of it is there at once."""
        generation = await generations.begin(self.request, self.model, [middle.submission], OPTIONS)

        def part(completion: Completion) -> AnswerPart:
            answered = middle.read(completion)
            return AnswerPart((ContentDelta(answered.text),), completion=answered)

        async def parts() -> AsyncIterator[AnswerPart]:
            (completion,) = await generation.finish()
            yield part(completion)

        return await self._answer(generation, parts(), part)

    def _thinking(self) -> dict[str, Any]:
        template, reasoning = self.model.llm.llm.tokenizer.chat_template or "", self.model.output_format.reasoning
        kwargs, warning = thinking_kwargs(self.body.think, template, can_think=reasoning is not None)
        if warning is not None:
            self.request.warn(warning)
        return {"chat_template_kwargs": kwargs} if kwargs else {}

    async def _answer(
        self, generation: Generation, parts: AsyncIterator[AnswerPart], read: Callable[[Completion], AnswerPart]
    ) -> Response:
        """As lines, or whole. read: makes one part of all of it."""
        request, writer = self.request, self.writer
        if self.body.is_stream:
            lines, format = line_stream(writer, parts), stream_format(writer)
            ping_s = self.settings.ping_s
            return EventStreamResponse(request, lines, format, comment=generation.progress, ping_s=ping_s)
        (completion,) = await generation.finish()
        part = read(completion)
        if generation.plan.has_scores:
            return await request.reply_from_thread(lambda: writer.whole(part))
        return request.reply(writer.whole(part))


@router.post(f"{PREFIX}chat", response_model=OllamaChatAnswer, responses=LINES, openapi_extra=body_of(OllamaChatBody))
async def chat(request: Charged, models: Models, generations: RunningGenerations, settings: Settings) -> Response:
    """Answer a conversation, in lines as they come or whole."""
    body = await request.body(OllamaChatBody)
    if not body.messages:
        return await _without_answer(request, models, body)
    asked = await _asked(request, models, body, settings)
    return await asked.chat(generations, chat_messages(body.messages))


@router.post(f"{PREFIX}generate", response_model=GenerateAnswer, responses=LINES, openapi_extra=body_of(GenerateBody))
async def generate(request: Charged, models: Models, generations: RunningGenerations, settings: Settings) -> Response:
    """Answer a prompt, or continue it as it is (raw), or fill in what stands before a suffix."""
    body = await request.body(GenerateBody)
    if not body.prompt and not body.suffix:
        return await _without_answer(request, models, body)
    asked = await _asked(request, models, body, settings)
    if body.raw or body.suffix or asked.model.llm.llm.tokenizer.chat_template is None:
        return await asked.text(generations, body)
    return await asked.chat(generations, prompt_messages(body))


async def _asked(
    request: RequestContext, models: ModelPool, body: OllamaChatBody | GenerateBody, settings: ServerConfig
) -> _OllamaTurn:
    """Load the model; a context that it does not have is refused."""
    model, load_s = await _loaded(request, models, body)
    model.llm.llm.submissions.require_generator("chat")
    check_context(body.options, model.entry.context)
    writer = LineWriter(body.model, _shape(body), model.llm.llm.tokenizer, load_s)
    return _OllamaTurn(request, body, model, writer, settings)


async def _loaded(
    request: RequestContext, models: ModelPool, body: OllamaChatBody | GenerateBody
) -> tuple[ServedModel, float]:
    """The model, and how long its load took."""
    began_at = time.monotonic()
    model = await request.use_model(models, model_id(body.model, models.ids))
    return model, time.monotonic() - began_at


async def _without_answer(request: RequestContext, models: ModelPool, body: OllamaChatBody | GenerateBody) -> Response:
    """Load the model, which is all that is asked for; with keep_alive 0 unload it, for admins, once it is idle."""
    if body.asks_to_unload:
        request.require_admin("keep_alive is 0, and models are unloaded")
        await request.while_awaited(models.unload(model_id(body.model, models.ids), drains=True))
        fields = empty_answer(body.model, _shape(body), "unload")
    else:
        model, _ = await _loaded(request, models, body)
        model.llm.llm.submissions.require_generator("chat")
        check_context(body.options, model.entry.context)
        fields = empty_answer(body.model, _shape(body), "load")
    if not body.is_stream:
        return request.reply(fields)
    return Response(line_bytes(fields), headers=request.headers, media_type=NDJSON)


def _shape(body: OllamaChatBody | GenerateBody) -> Shape:
    return "chat" if isinstance(body, OllamaChatBody) else "generate"
