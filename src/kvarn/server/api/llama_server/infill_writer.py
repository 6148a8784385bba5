"""Answers of /infill as llama-server writes them, whole and as events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from kvarn.server.api.llama_server.line_limits import LineLimits, LineReader
from kvarn.server.api.openai.logprobs import chat_logprobs
from kvarn.types import Completion, FinishReason, TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from kvarn.server.api.llama_server.infill_schema import InfillBody
    from kvarn.server.chat.generation import Generation
    from kvarn.tokenizer.tokenizer import Tokenizer


class InfillChoice:
    """One of the answers as it comes."""

    def __init__(self, index: int, body: InfillBody) -> None:
        self.index = index
        self.completion: Completion | None = None  # once it has ended
        self._lines = LineReader(LineLimits(body.n_indent or 0, max(0, body.t_max_predict_ms or 0)))
        self._began: float | None = None
        self._parts: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether no more of it is wanted."""
        return self._lines.is_over or self.completion is not None

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def stop_type(self) -> str:
        if self._lines.is_over:
            return "limit"
        assert self.completion is not None
        if self.completion.finish_reason is FinishReason.STOP:
            return "word" if isinstance(self.completion.stop_match, str) else "eos"
        return "limit" if self.completion.finish_reason is FinishReason.LENGTH else "none"

    def take(self, event: TokenEvent) -> str:
        """What an event adds to the text."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        kept = self._lines.take(event.text, (now - self._began) * 1e3)
        self._parts.append(kept)
        self.completion = event.completion or self.completion
        return kept


class InfillWriter:
    """Reads the answers of one generation and writes them."""

    def __init__(self, generation: Generation, body: InfillBody) -> None:
        self._generation = generation
        self._body = body
        self._tokenizer = generation.model.llm.llm.tokenizer
        self.choices = [InfillChoice(index, body) for index in range(generation.num_choices)]

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        async for choice, event, text in self._read():
            scores = [] if event.logprob is None else [event.logprob]
            if text or scores:
                part: dict[str, Any] = {"index": choice.index, "content": text, "stop": False}
                yield event_bytes(part | self._probabilities(scores))
            if event.completion is not None and event.completion.finish_reason is not FinishReason.DEADLINE:
                yield event_bytes(self._chosen(self._ended(choice, "")))

    async def finish(self) -> None:
        """Wait for the end of all answers."""
        try:
            async for _ in self._read():
                pass
        except BaseException:
            self._generation.close()  # settles what was used before a refusal reports what is left of the limits
            raise

    def answer(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer, or a list of several."""
        answers = [self._whole(choice) for choice in self.choices]
        return answers[0] if len(answers) == 1 else answers

    async def _read(self) -> AsyncIterator[tuple[InfillChoice, TokenEvent, str]]:
        async for batch in self._generation.batches():
            for _, event in batch:
                choice = self.choices[event.choice]
                was_over, text = choice.is_over, choice.take(event)
                if not was_over or event.completion is not None:
                    yield choice, event, text
            if all(choice.is_over for choice in self.choices):
                self._generation.cancel()  # which does nothing if all have ended by themselves

    def _whole(self, choice: InfillChoice) -> dict[str, Any]:
        completion = choice.completion
        assert completion is not None
        ended = self._ended(choice, choice.text) | self._probabilities(completion.logprobs or ())
        if self._body.return_tokens:
            ended["tokens"] = list(completion.token_ids)
        return self._chosen(ended)

    def _ended(self, choice: InfillChoice, content: str) -> dict[str, Any]:
        completion = choice.completion
        assert completion is not None
        usage = completion.usage
        return {
            "index": choice.index,
            "content": content,
            "stop": True,
            "model": self._generation.model.id,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "truncated": False,
            "stop_type": choice.stop_type,
            "stopping_word": completion.stop_match if isinstance(completion.stop_match, str) else "",
            "timings": _timings(completion),
        }

    def _probabilities(self, scores: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"completion_probabilities": _scored(self._tokenizer, scores)} if scores else {}

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What response_fields asks for, by the paths that it has there."""
        paths = self._body.response_fields
        return {path: value for path in paths for value in _at(answer, path)} if paths else answer


def event_bytes(fields: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()


def _at(answer: dict[str, Any], path: str) -> list[Any]:
    """The value at a path such as timings/prompt_n, if there is one."""
    value: Any = answer
    for name in path.split("/"):
        if not isinstance(value, dict) or name not in value:
            return []
        value = value[name]
    return [value]


def _scored(tokenizer: Tokenizer, scores: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    written = chat_logprobs(tokenizer, scores)
    for one, score in zip(written, scores, strict=True):
        one["id"] = score.token_id
        for top, (token_id, _) in zip(one["top_logprobs"], score.top, strict=True):
            top["id"] = token_id
    return written


def _timings(completion: Completion) -> dict[str, float]:
    usage, timings = completion.usage, completion.timings
    num_read = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        **_rate("prompt", num_read, timings.prefill_s),
        **_rate("predicted", usage.completion_tokens, timings.decode_s),
    }


def _rate(name: str, num_tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": round(seconds * 1e3, 3),
        f"{name}_per_token_ms": round(seconds * 1e3 / num_tokens, 3) if num_tokens else 0.0,
        f"{name}_per_second": round(num_tokens / seconds, 3) if seconds > 0 else 0.0,
    }
