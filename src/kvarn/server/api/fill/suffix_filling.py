"""`suffix` of /v1/completions for diffusion models: all of a middle comes at once, so that a stream has one part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from kvarn.server.api.openai.completions_writer import TextWriter
from kvarn.server.api.openai.envelope import Envelope
from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.prompt_limits import check_bounded
from kvarn.server.http.json_body import write_json
from kvarn.tokenizer.fim import Infill
from kvarn.types import Usage

if TYPE_CHECKING:
    from kvarn.engine.submission import Submission
    from kvarn.server.api.openai.completions_schema import CompletionBody
    from kvarn.server.chat.generation import Generation
    from kvarn.server.models.served_model import ServedModel
    from kvarn.submissions import ReadMiddle
    from kvarn.types import SamplingParams

DECIDED = ("pinned", "events")  # of diffusion: the suffix decides what is pinned, and all comes at once


class SuffixFilling:
    """What fits between each prompt of a body and its suffix."""

    def __init__(self, model: ServedModel, body: CompletionBody, params: SamplingParams) -> None:
        for name in DECIDED:
            if body.diffusion is not None and getattr(body.diffusion, name):
                raise InvalidField(f"diffusion.{name} has no meaning beside suffix; leave it out", f"diffusion.{name}")
        self._body = body
        self.middles = [Middle(model, prompt, body.suffix or "", params) for prompt in body.prompt]

    async def answer(self, generation: Generation) -> dict[str, Any]:
        """The whole answer, once it is there."""
        results = [one.read(result) for one, result in zip(self.middles, await generation.finish(), strict=True)]
        envelope = Envelope.of(generation, "cmpl-", "text_completion")
        writer = TextWriter(envelope, generation.model.llm.llm.tokenizer, self._body, [("", ())] * len(results))
        each = [choice for one in results for choice in (one, *one.alternatives)]
        usage = Usage(
            sum(one.usage.prompt_tokens for one in results),
            sum(one.usage.completion_tokens for one in each),
            sum(one.usage.cached_tokens for one in results),
        )
        return writer.answer(results, usage)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The same as a stream, without [DONE]."""
        answer = await self.answer(generation)
        usage, options = answer.pop("usage"), self._body.stream_options
        for choice in answer["choices"]:
            yield b"data: " + write_json({**answer, "choices": [choice]}) + b"\n\n"
        if options is not None and options.include_usage:
            yield b"data: " + write_json({**answer, "choices": [], "usage": usage}) + b"\n\n"


class Middle:
    """One prompt on its way to the engine: made in a worker thread, read when it is filled."""

    def __init__(self, model: ServedModel, prompt: str | list[int], suffix: str, params: SamplingParams) -> None:
        self._llm = model.llm.llm
        self._prompt = prompt
        self._suffix = suffix
        self._params = params
        self.read: ReadMiddle

    def submission(self) -> Submission:
        llm = self._llm
        prefix, ids = (self._prompt, None) if isinstance(self._prompt, str) else ("", self._prompt)
        check_bounded(llm, [prefix], None)
        check_bounded(llm, [self._suffix], "suffix")
        infill = Infill(prefix, self._suffix)
        submission, self.read = llm.submissions.of_middle(infill, self._params, llm.context, prompt_ids=ids)
        return submission
