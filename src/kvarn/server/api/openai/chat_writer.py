"""A finished chat as OpenAI's clients read it. Pure: completions in, one dict out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvarn.server.api.openai.envelope import Envelope, finish_word, usage_fields
from kvarn.server.api.openai.logprobs import chat_logprobs, prompt_logprobs
from kvarn.server.chat.output.deltas import ParsedOutput
from kvarn.types import Completion

if TYPE_CHECKING:
    from kvarn.server.chat.generation import Generation
    from kvarn.server.chat.output.output_plan import OutputPlan
    from kvarn.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """All that turns a completion into an answer."""

    envelope: Envelope
    generation: Generation
    plan: OutputPlan

    @property
    def tokenizer(self) -> Tokenizer:
        return self.generation.model.llm.llm.tokenizer

    def answer(self, completion: Completion) -> dict[str, Any]:
        """The whole answer with all its choices."""
        choices = (completion, *completion.alternatives)
        answer = {
            **self.envelope.fields(),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_fields(self.generation.usage()),
        }
        if completion.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self.tokenizer, completion.prompt_logprobs)
        return answer

    def contents(self, completion: Completion) -> list[str]:
        """The text of each choice without its reasoning and calls."""
        choices = enumerate((completion, *completion.alternatives))
        return [self.generation.reader(self.plan, index).parse(choice.text).content or "" for index, choice in choices]

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        parsed = self.generation.reader(self.plan, index).parse(completion.text)
        scores = completion.logprobs
        return {
            "index": index,
            "message": _message(parsed),
            "logprobs": None if scores is None else {"content": chat_logprobs(self.tokenizer, scores)},
            "finish_reason": finish_word(completion.finish_reason, has_whole_calls=parsed.has_whole_calls),
        }


def _message(parsed: ParsedOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or ""}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in parsed.tool_calls
        ]
    return message
