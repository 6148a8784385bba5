"""What may enter the engine: every number of a request is checked against the model before it costs anything.

Refuses what can never be served, whoever else is there; throttle.py refuses what cannot be served now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvarn.errors import InvalidParameter, PromptTooLong
from kvarn.sampling.custom_samplers import find_sampler
from kvarn.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """The bounds of one model on one machine."""

    vocab_size: int
    context: int  # tokens of prompt and answer together
    pool_tokens: int | None = None  # what the whole KV cache holds; None: as much as anybody wants

    def admit(self, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[tuple[int, ...], int]:
        """The prompt as it will be read and the longest answer to it, or a refusal with the numbers."""
        self.check_tokens("prompt", prompt_ids)
        self.check_tokens("stop_token_ids", params.stop_token_ids)
        self.check_tokens("logit_bias", params.logit_bias)
        if not prompt_ids:
            raise InvalidParameter("the prompt is empty; give at least one token")
        if params.sampler is not None:
            find_sampler(params.sampler)
        if params.deadline_s is not None and params.deadline_s <= 0:
            raise InvalidParameter(f"deadline_s is {params.deadline_s:g}, which has passed; give a later one")
        prompt = tuple(prompt_ids)
        if params.truncate == "left":
            prompt = prompt[-self._prompt_room(params) :]
        self.check_length(len(prompt), self.context - 1)
        return prompt, self._answer_room(len(prompt), params)

    def check_tokens(self, field: str, token_ids: Iterable[int]) -> None:
        where = "the prompt" if field == "prompt" else field
        for token_id in token_ids:
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self.vocab_size:
                raise InvalidParameter(
                    f"token id {token_id!r:.40} in {where} is outside the vocabulary; "
                    f"give 0 to {self.vocab_size - 1:,}",
                    field=field,
                )

    def check_length(self, num_tokens: int, limit: int) -> None:
        if num_tokens > limit:
            raise PromptTooLong(num_tokens, limit)

    def _prompt_room(self, params: SamplingParams) -> int:
        """Tokens a truncated prompt keeps: max_tokens are left for the answer, but at most half of the context."""
        answer = 1 if params.max_tokens is None else params.max_tokens
        return max(1, self.context - max(1, min(answer, self.context // 2)))

    def _answer_room(self, num_prompt: int, params: SamplingParams) -> int:
        """Tokens of the longest answer; n of them share the KV cache with one prompt."""
        room = self.context - num_prompt
        if params.n > 1 and self.pool_tokens is not None:
            share = (self.pool_tokens - num_prompt) // params.n
            wanted = 1 if params.max_tokens is None else min(params.max_tokens, room)
            if wanted > share:
                raise InvalidParameter(
                    f"{params.n} answers of up to {wanted:,} tokens to a prompt of {num_prompt:,} need "
                    f"{num_prompt + params.n * wanted:,} tokens, the KV cache holds {self.pool_tokens:,}; "
                    "lower n or max_tokens, or raise kv_bytes="
                )
            room = min(room, share)
        return room if params.max_tokens is None else min(params.max_tokens, room)
