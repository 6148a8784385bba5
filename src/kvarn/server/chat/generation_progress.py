"""How far the engine requests of one generation are. Reads what the engine's thread writes; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kvarn.engine.scheduling.rate_limit import MIN_EXPECTED
from kvarn.request import Phase
from kvarn.types import TokenEvent, Usage

if TYPE_CHECKING:
    from kvarn.observe.histogram import Histogram
    from kvarn.request import Request

GenerationPhase = Literal["queued", "prefill", "decode", "finished"]
FURTHEST_FIRST: tuple[Phase, ...] = ("decode", "prefill", "queued")


class TokenGaps:
    """Observes the seconds between two tokens of each answer."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._last_at: dict[tuple[int, int], float] = {}  # by prompt and choice

    def observe(self, prompt_index: int, token: TokenEvent) -> None:
        """A token of an answer has come just now, perhaps with some before it."""
        now, answer = time.monotonic(), (prompt_index, token.choice)
        before, num_tokens = self._last_at.get(answer), token.num_more + (token.token_id is not None)
        if before is not None and num_tokens:
            self._histogram.observe((now - before) / num_tokens, num_tokens)
        self._last_at[answer] = now


def phase_of(requests: Sequence[Request]) -> Phase:
    """Of the request that got furthest; when all have finished is for the caller to know."""
    return min((request.phase for request in requests), key=FURTHEST_FIRST.index, default="queued")


def prompt_progress(requests: Sequence[Request]) -> tuple[int, int]:
    """Prompt tokens computed, and all of them."""
    firsts = _one_per_prompt(requests)
    done = sum(min(request.num_computed, request.num_prompt) for request in firsts)
    return done, sum(request.num_prompt for request in firsts)


def left_s(requests: Sequence[Request]) -> float | None:
    """Seconds until all have ended, if they get as long as they may; None while one has written too little to tell."""
    times = [_left_s(request) for request in requests if not request.is_ended]
    known = [one for one in times if one is not None]
    return max(known, default=0.0) if requests and len(known) == len(times) else None


def _left_s(request: Request) -> float | None:
    num_more = request.num_output - request.num_first
    if request.first_token_at is None or num_more <= 0:
        return None
    num_left = request.max_total_tokens - len(request.token_ids)
    if request.params.max_tokens is None:  # few get so long: the usual length, or as much again
        num_left = min(num_left, max(MIN_EXPECTED - request.num_output, request.num_output))
    return num_left * (request.clock() - request.first_token_at) / num_more


def usage_of(requests: Sequence[Request]) -> Usage:
    """Tokens so far: each prompt once, the answers of all choices."""
    firsts = _one_per_prompt(requests)
    return Usage(
        prompt_tokens=sum(request.num_prompt for request in firsts),
        completion_tokens=sum(request.num_output for request in requests),
        cached_tokens=sum(request.num_cached or 0 for request in firsts),
        accepted_prediction_tokens=sum(request.num_accepted_prediction for request in requests),
        rejected_prediction_tokens=sum(request.num_rejected_prediction for request in requests),
    )


def num_charged(requests: Sequence[Request]) -> int:
    """Tokens that count against the key's limits: the prompts that were begun, and every answer."""
    started = [request for request in requests if request.started_at is not None]
    num_prompt = sum(request.num_prompt for request in _one_per_prompt(started))
    return num_prompt + sum(request.num_output for request in started)


def _one_per_prompt(requests: Sequence[Request]) -> list[Request]:
    """The choices of one prompt share it."""
    return [request for request in requests if request.choice == 0]
