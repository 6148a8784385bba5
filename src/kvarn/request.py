"""One request and its state machine: every transition is in this file.

    waiting ──start──> running ──finish──> finished
       │                  ├──────fail────> failed
       └──cancel──────────┴────cancel────> cancelled

Knows token ids and times; knows no text, no blocks and no model.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from enum import StrEnum

from kvarn.errors import Cancelled, KvarnError
from kvarn.types import Completion, FinishReason, SamplingParams, Timings, TokenLogprob, Usage


class RequestState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FAILED, RequestState.CANCELLED}),
    RequestState.RUNNING: ENDED,
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended, and the stop string or token id that did it."""

    reason: FinishReason
    match: str | int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way to a completion; changed by the engine's thread only (cancel excepted)."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int  # prompt and answer together never exceed this
    seed: int
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt, then answer
    num_computed: int = 0  # tokens whose K and V lie in the cache
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    error: KvarnError | None = None
    is_cancel_requested: bool = False
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None

    def __post_init__(self) -> None:
        self.token_ids.extend(self.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[len(self.prompt_ids) :])

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED

    def append(self, token_id: int) -> None:
        """Take one committed token of the answer."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.token_ids.append(token_id)

    def start(self) -> None:
        self._enter(RequestState.RUNNING)
        self.started_at = time.perf_counter()

    def finish(self, finish: Finish) -> None:
        self._end(RequestState.FINISHED, finish)

    def fail(self, error: KvarnError) -> None:
        self.error = error
        self._end(RequestState.FAILED, Finish(FinishReason.FAILED))

    def cancel(self) -> None:
        self.error = Cancelled(f"request {self.id} was cancelled")
        self._end(RequestState.CANCELLED, Finish(FinishReason.CANCELLED))

    def completion(self, text: str) -> Completion:
        """The result of an ended request."""
        assert self.finish_reason is not None
        return Completion(
            text=text,
            token_ids=self.output_ids,
            finish_reason=self.finish_reason,
            usage=Usage(len(self.prompt_ids), self.num_output),
            timings=self._timings(),
            seed=self.seed,
            stop_match=self.stop_match,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
        )

    def _timings(self) -> Timings:
        end = self.ended_at if self.ended_at is not None else time.perf_counter()
        start = self.started_at if self.started_at is not None else end
        first = self.first_token_at if self.first_token_at is not None else end
        return Timings(
            queue_s=start - self.submitted_at,
            prefill_s=first - start,
            decode_s=end - first,
            first_token_s=first - self.submitted_at,
        )

    def _end(self, state: RequestState, finish: Finish) -> None:
        self._enter(state)
        self.finish_reason, self.stop_match = finish.reason, finish.match
        self.ended_at = time.perf_counter()

    def _enter(self, state: RequestState) -> None:
        assert state in TRANSITIONS[self.state], f"request {self.id}: {self.state} -> {state}"
        self.state = state


def draw_seed() -> int:
    """A seed for a request that named none; 63 bits, so that it can be passed back in."""
    return secrets.randbits(63)
