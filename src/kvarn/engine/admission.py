"""What may enter the engine: every number of a request is checked against the model before it costs anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvarn.errors import InvalidParameter, PromptTooLong
from kvarn.request import Request, draw_seed
from kvarn.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """The bounds of one model on one machine."""

    vocab_size: int
    context: int  # tokens of prompt and answer together

    def admit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Make the request, or refuse it with the numbers. Nothing is ever truncated."""
        self.check_tokens("the prompt", prompt_ids)
        self.check_tokens("stop_token_ids", params.stop_token_ids)
        self.check_tokens("logit_bias", params.logit_bias)
        if not prompt_ids:
            raise InvalidParameter("the prompt is empty; give at least one token")
        self.check_length(len(prompt_ids), self.context - 1)
        room = self.context - len(prompt_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return Request(
            id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_total_tokens=len(prompt_ids) + max_tokens,
            seed=draw_seed() if params.seed is None else params.seed,
        )

    def check_tokens(self, where: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self.vocab_size:
                raise InvalidParameter(
                    f"token id {token_id!r:.40} in {where} is outside the vocabulary; give 0 to {self.vocab_size - 1:,}"
                )

    def check_length(self, num_tokens: int, limit: int) -> None:
        if num_tokens > limit:
            raise PromptTooLong(num_tokens, limit)
