"""What may enter the engine: every number of a request is checked against the model before it costs anything.

Refuses what can never be served, whatever else is running; rate_limit.py refuses what cannot be served now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvarn.checks import short
from kvarn.decoding.decoder import Decoder
from kvarn.engine.submission import Admitted, Submission
from kvarn.errors import InvalidParameter, PromptTooLong
from kvarn.kv.cache import KVCache
from kvarn.sampling.custom_samplers import find_sampler
from kvarn.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """The bounds of one model on one machine. Any thread may ask: only constants are read."""

    vocab_size: int  # ids of the model, those that no token has included
    context: int  # tokens of prompt and answer together
    decoder: Decoder  # knows which parameters it honours and what it computes for them
    kv: KVCache  # its size

    def admit(self, submission: Submission) -> Submission:
        """Return the submission with its bounds, or refuse it with the numbers; it is checked once only."""
        if submission.admitted is not None:
            return submission
        params = submission.params
        if params.constraint is not None and submission.constraint is None:
            raise InvalidParameter(
                "the constraint was not compiled for this model; submit through kvarn.LLM", field="constraint"
            )
        prompt_ids = self._prompt(submission.prompt_ids, params)
        bounds = self.decoder.bound(prompt_ids, params, self._answer_room(len(prompt_ids), params))
        self._check_memory(bounds.sequence_lengths)
        return replace(submission, admitted=Admitted(prompt_ids, bounds.max_tokens))

    def check_tokens(self, field: str, token_ids: Iterable[int]) -> None:
        """Refuse what is no id of a token; field: where the caller wrote it."""
        unused, token_ids = self.decoder.unused.ids, list(token_ids)
        if not token_ids or self._are_tokens(token_ids):
            return
        where = "the prompt" if field == "prompt" else field
        for token_id in token_ids:
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self.vocab_size:
                raise InvalidParameter(
                    f"token id {short(token_id)} in {where} is outside the vocabulary; "
                    f"give 0 to {self.vocab_size - 1:,}",
                    field=field,
                )
            if token_id in unused:
                raise InvalidParameter(
                    f"token id {token_id:,} in {where} stands for no token: {len(unused):,} of the model's "
                    f"{self.vocab_size:,} ids are padding or holes in its vocabulary; give the id of a token",
                    field=field,
                )

    def _are_tokens(self, token_ids: list[int]) -> bool:
        """All of some ids at once, for prompts of thousands of them; False: one is not, or of another type."""
        if list(map(type, token_ids)).count(int) < len(token_ids) or min(token_ids) < 0:
            return False
        unused, highest = self.decoder.unused, max(token_ids)
        if unused.first is not None and highest >= unused.first and not unused.ids.isdisjoint(token_ids):
            return False
        return highest < self.vocab_size

    def check_length(self, num_tokens: int, limit: int) -> None:
        if num_tokens > limit:
            raise PromptTooLong(num_tokens, limit)

    def _prompt(self, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        """The checked prompt, truncated where that was asked for."""
        self.check_tokens("prompt", prompt_ids)
        self.check_tokens("stop_token_ids", params.stop_token_ids)
        self.check_tokens("logit_bias", params.logit_bias)
        if params.diffusion is not None:
            self.check_tokens("pinned", params.diffusion.pinned_ids.values())
        if not prompt_ids:
            raise InvalidParameter("the prompt is empty; give at least one token", field="prompt")
        if params.sampler is not None:
            find_sampler(params.sampler)
        if params.deadline_s is not None and params.deadline_s <= 0:
            raise InvalidParameter(
                f"deadline_s is {params.deadline_s:g}, which has passed; give a later one", field="deadline_s"
            )
        prompt = tuple(prompt_ids)
        if params.truncate == "left":
            prompt = prompt[-self._prompt_room(params) :]
        self.check_length(len(prompt), self.context - 1)
        return prompt

    def _prompt_room(self, params: SamplingParams) -> int:
        """Tokens a truncated prompt keeps: max_tokens are left for the answer, but at most half of the context."""
        answer = 1 if params.max_tokens is None else params.max_tokens
        return max(1, self.context - max(1, min(answer, self.context // 2)))

    def _answer_room(self, num_prompt: int, params: SamplingParams) -> int:
        """Tokens of the longest answer; n of them share the KV cache with one prompt."""
        room = self.context - num_prompt
        if params.n > 1:
            pool_tokens = self.kv.max_tokens
            share = (pool_tokens - num_prompt) // params.n
            wanted = 1 if params.max_tokens is None else min(params.max_tokens, room)
            if wanted > share:
                raise InvalidParameter(
                    f"{params.n} answers of up to {wanted:,} tokens to a prompt of {num_prompt:,} need "
                    f"{num_prompt + params.n * wanted:,} tokens, the KV cache holds {pool_tokens:,}; "
                    "lower n or max_tokens, or raise kv_bytes=",
                    field="n",
                )
            room = min(room, share)
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _check_memory(self, sequence_lengths: Sequence[int]) -> None:
        """A request must fit into the KV cache alone, else it would wait for ever."""
        num_blocks = sum(map(self.kv.blocks_for, sequence_lengths))
        if num_blocks > self.kv.num_blocks:
            raise InvalidParameter(
                f"the request needs {num_blocks * self.kv.block_size:,} tokens of KV cache, which holds "
                f"{self.kv.max_tokens:,}; lower max_tokens, use another cache or no guidance, or raise kv_bytes=",
                field="max_tokens",
            )
