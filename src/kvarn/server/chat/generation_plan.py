"""From a checked body to submissions the engine can take: every number is compared with the model before it costs.

Runs in worker threads. Knows token counts and limits; knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvarn.engine.submission import Submission
from kvarn.errors import InvalidParameter
from kvarn.server.api.schema import InvalidField

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.server.access.keys import Principal
    from kvarn.server.call import Call

Prepare = Callable[[], Sequence[Submission]]
Room = tuple[int, int]  # tokens of a prompt, and of the longest answer to it
MAX_LOGPROB_ENTRIES = 1_000_000  # of one call, held until it ends: about 100 bytes each
MAX_PROMPT_LOGPROB_ENTRIES = 65_536


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a caller may ask for beside sampling."""

    priority: int | None = None  # clamped to the tier; None: the tier's own
    cache_salt: str = ""  # finds only cached prefixes of the same tenant and salt
    limit_field: str = "max_tokens"  # what the body calls the longest answer


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Checked submissions, and what they may take together."""

    submissions: tuple[Submission, ...]
    num_tokens: int
    num_answers: int

    @property
    def has_scores(self) -> bool:
        """Whether somebody wants logprobs, which take long to write."""
        wanted = (one.params for one in self.submissions)
        return any(params.logprobs is not None or params.prompt_logprobs is not None for params in wanted)


def make_plan(call: Call, llm: LLM, prepare: Prepare, wishes: RequestOptions) -> GenerationPlan:
    """Runs in a worker thread: encode, then check every number against the model."""
    submissions = tuple(prepare())
    rooms = [_room(llm, one, wishes.limit_field) for one in submissions]
    submissions, rooms = _within_a_minute(call.principal.tier.tokens_per_min, submissions, rooms)
    _require_bounded(call, submissions, rooms)
    num_tokens = sum(
        num_prompt + one.params.n * room for one, (num_prompt, room) in zip(submissions, rooms, strict=True)
    )
    left_s = call.state.config.request_timeout_s - (time.monotonic() - call.received_at)
    principal = call.principal
    tenant = tenant_of(principal, wishes.cache_salt)
    changes = {"deadline_s": max(left_s, 1e-3), "priority": principal.tier.clamp(wishes.priority)}
    ready = tuple(replace(one, params=one.params.replace(**changes), tenant=tenant) for one in submissions)
    num_answers = sum(one.params.n for one in submissions)
    return GenerationPlan(ready, num_tokens, num_answers)


def tenant_of(principal: Principal, cache_salt: str) -> str:
    """Whose cached prefixes a request may find."""
    return f"{principal.tenant}\0{cache_salt}" if cache_salt else principal.tenant


def _room(llm: LLM, submission: Submission, limit_field: str) -> Room:
    """Tokens of the prompt and of the longest answer; an answer that cannot get as long as asked for is refused."""
    params = submission.params
    prompt, room = llm.admission.admit(submission.prompt_ids, params)
    if params.prefill_only:
        return len(prompt), 0
    if params.max_tokens is not None and room < params.max_tokens:
        raise InvalidField(
            f"{limit_field} is {params.max_tokens:,} and the prompt has {len(prompt):,} tokens; the context allows "
            f"{llm.context:,} together; lower it to {room:,} or shorten the prompt",
            limit_field,
            "context_length_exceeded",
        )
    return len(prompt), room


def _within_a_minute(
    limit: int | None, submissions: Sequence[Submission], rooms: Sequence[Room]
) -> tuple[tuple[Submission, ...], list[Room]]:
    """Answers for which nobody named a length share what a minute of the tier leaves; at least one token each."""
    pairs = list(zip(submissions, rooms, strict=True))
    num_open = sum(one.params.n for one in submissions if _is_open(one))
    if limit is None or not num_open:
        return tuple(submissions), list(rooms)
    fixed = sum(num_prompt + (0 if _is_open(one) else one.params.n * room) for one, (num_prompt, room) in pairs)
    share = max(1, (limit - fixed) // num_open)
    shortened = [
        (replace(one, params=one.params.replace(max_tokens=share)), (num_prompt, share))
        if _is_open(one) and room > share
        else (one, (num_prompt, room))
        for one, (num_prompt, room) in pairs
    ]
    return tuple(one for one, _ in shortened), [room for _, room in shortened]


def _is_open(submission: Submission) -> bool:
    return submission.params.max_tokens is None and not submission.params.prefill_only


def _require_bounded(call: Call, submissions: Sequence[Submission], rooms: Sequence[Room]) -> None:
    """Refuse what could never be queued, and logprobs that would fill the memory."""
    num_choices, limit = sum(one.params.n for one in submissions), call.state.config.queue_limit
    if num_choices > limit:
        raise InvalidParameter(f"{num_choices:,} answers were asked for at once, the queue holds {limit:,}; send less")
    pairs = list(zip(submissions, rooms, strict=True))
    entries = sum(_entries(one.params.logprobs) * one.params.n * room for one, (_, room) in pairs)
    if entries > MAX_LOGPROB_ENTRIES:
        raise InvalidField(
            f"{entries:,} logprobs could be returned, at most {MAX_LOGPROB_ENTRIES:,} are; "
            "lower top_logprobs, max_tokens or n",
            "logprobs",
        )
    read = sum(_entries(one.params.prompt_logprobs) * num_prompt for one, (num_prompt, _) in pairs)
    if read > MAX_PROMPT_LOGPROB_ENTRIES:
        raise InvalidField(
            f"{read:,} logprobs of prompt tokens would be returned, at most {MAX_PROMPT_LOGPROB_ENTRIES:,} are; "
            "shorten the prompt or lower prompt_logprobs",
            "prompt_logprobs",
        )


def _entries(top: int | None) -> int:
    """Logprobs of one token: the chosen one and the most probable ones."""
    return 0 if top is None else 1 + top
