"""Text completions as OpenAI's clients read them, whole and as a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any

from kvarn.server.api.openai.chat_stream import ChunkFrame, written_batches
from kvarn.server.api.openai.envelope import Envelope, finish_word, usage_fields
from kvarn.server.api.openai.logprobs import LegacyLogprobsWriter, prompt_logprobs
from kvarn.types import Completion, FinishReason, TokenEvent, TokenLogprob, Usage

if TYPE_CHECKING:
    from kvarn.server.api.openai.completions_schema import CompletionBody
    from kvarn.server.chat.generation import Generation
    from kvarn.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextWriter:
    """All that turns completions into an answer; prompts as they were read."""

    envelope: Envelope
    tokenizer: Tokenizer
    body: CompletionBody
    prompts: Sequence[tuple[str, Sequence[int]]]  # text and ids of each

    def answer(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """The answers to all prompts, the n of the first prompt first."""
        choices = [
            self._choice(prompt, completion, one)
            for prompt, completion in zip(self.prompts, completions, strict=True)
            for one in (completion, *completion.alternatives)
        ]
        numbered = [{"index": index, **choice} for index, choice in enumerate(choices)]
        return {**self.envelope.fields(), "choices": numbered, "usage": usage_fields(usage)}

    def _choice(self, prompt: tuple[str, Sequence[int]], first: Completion, completion: Completion) -> dict[str, Any]:
        text, ids = prompt
        has_echo = bool(self.body.echo)
        choice: dict[str, Any] = {
            "text": text + completion.text if has_echo else completion.text,
            "logprobs": None,
            "finish_reason": finish_word(completion.finish_reason),
        }
        if self.body.logprobs is not None:
            choice["logprobs"] = self._logprobs(ids if has_echo else (), first.prompt_logprobs or (), completion)
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, first.prompt_logprobs or ())
        return choice

    def _logprobs(
        self, echoed: Sequence[int], scores: Sequence[TokenLogprob], completion: Completion
    ) -> dict[str, Any]:
        lists = LegacyLogprobsWriter(self.tokenizer, starts_text=bool(echoed))
        # One longer: the first token of a prompt has no score.
        for token_id, score in zip_longest(echoed, [None, *scores][: len(echoed)]):
            lists.add(token_id, score)
        for token_id, score in zip(completion.token_ids, completion.logprobs or (), strict=True):
            lists.add(token_id, score)
        return lists.fields()


class TextChoiceStream:
    """One answer, event by event."""

    def __init__(
        self, index: int, frame: ChunkFrame, tokenizer: Tokenizer, echoed: str, logprobs: LegacyLogprobsWriter | None
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._frame = frame
        self._echoed = echoed  # the prompt, until it has been sent
        self._logprobs = logprobs

    def chunks(self, event: TokenEvent) -> str:
        """The chunk of one event, if there is something to tell."""
        if event.canvas is not None:
            return self._frame.canvas_chunk(self._index, event.canvas, self._tokenizer)
        text, self._echoed = self._echoed + event.text, ""
        logprobs = "null"
        if self._logprobs is not None and event.logprob is not None and event.token_id is not None:
            self._logprobs.add(event.token_id, event.logprob)
            logprobs = json.dumps(self._logprobs.take(), separators=(",", ":"))
        reason = event.finish_reason
        finish = "null" if reason in (None, FinishReason.DEADLINE) else f'"{finish_word(reason)}"'
        if not text and logprobs == finish == "null":
            return ""
        written = quoted(text)
        return self._frame.chunk(
            f'{{"index":{self._index},"text":{written},"logprobs":{logprobs},"finish_reason":{finish}}}'
        )


async def text_events(
    generation: Generation, envelope: Envelope, body: CompletionBody, prompts: Sequence[tuple[str, Sequence[int]]]
) -> AsyncIterator[bytes]:
    """Everything but [DONE]."""
    frame = ChunkFrame(envelope, body.stream_options)
    tokenizer = generation.model.llm.llm.tokenizer
    num_choices = body.n or 1

    def choice(index: int) -> TextChoiceStream:
        logprobs = LegacyLogprobsWriter(tokenizer) if body.logprobs is not None else None
        echoed = prompts[index // num_choices][0] if body.echo else ""
        return TextChoiceStream(index, frame, tokenizer, echoed, logprobs)

    choices = [choice(index) for index in range(len(prompts) * num_choices)]
    async for written in written_batches(
        generation, frame, lambda index, event: choices[index * num_choices + event.choice]
    ):
        yield written
    if frame.has_usage:
        yield frame.usage_chunk(generation.usage())
