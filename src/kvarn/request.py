"""One request and its state machine: every transition is in this file.

    waiting ──start──> running ──finish──> finished     (all four also while waiting: finish by a token that
       │  <──preempt──    ├──────fail────> failed        was under way when the request was preempted)
       └──cancel, expire──┴──cancel, expire──> cancelled

Knows token ids and times; knows no text, no blocks and no model.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any, Literal

from kvarn.errors import Cancelled, DeadlineExceeded, KvarnError
from kvarn.structured.constraints import CanvasSlot, Compiled
from kvarn.types import Completion, FinishReason, SamplingParams, Timings, TokenLogprob, Usage

Clock = Callable[[], float]  # seconds, never going back
Phase = Literal["queued", "prefill", "decode"]


class RequestState(StrEnum):
    """Where a request is; the last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: ENDED | {RequestState.RUNNING},  # finished: by a token that was under way
    RequestState.RUNNING: ENDED | {RequestState.WAITING},
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
    """A prompt on its way to a completion; changed by the engine's thread only (is_cancel_requested excepted)."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int  # prompt and answer together never exceed this
    seed: int
    _: KW_ONLY
    tenant: str = ""
    prefix_salt: str = ""  # of its blocks in the prefix cache: the tenant, and the hash of its adapters
    prefix_marks: tuple[tuple[int, int], ...] = ()  # texts of the prompt that a router knows, until they are named
    adapters: tuple[Any, ...] = ()  # AdapterUse: what is added to the base; dropped when it ends
    choice: int = 0  # which of the n answers to one prompt
    fork_of: Request | None = None  # choice 0, whose prompt this one shares
    clock: Clock = time.perf_counter
    number: int = 0  # in order of submission
    constraint: Compiled | None = None  # params.constraint, compiled for the model's vocabulary
    slots: tuple[CanvasSlot, ...] = ()  # of a canvas, each with a constraint of its own
    is_streamed: bool = True  # somebody reads its tokens as they come
    is_polled: bool = False  # who takes them from token_ids: its only event is the last
    # What the parts of the engine keep about this request, each for itself; it ends with the request.
    queue_position: int | None = None  # engine.scheduling.queue: where it lies in the heap while it waits
    text: Any = None  # engine.stream: the answer as text so far
    charge: Any = None  # engine.rate_limit: what it took from the token window
    sampling: Any = None  # decoding: what its choices of tokens depend on
    prediction_ids: tuple[int, ...] = ()  # what the caller expects the answer to be
    drafting: Any = None  # decoding.speculation: where its drafts come from
    num_accepted_prediction: int = 0  # tokens of the prediction that were computed as drafts and right ...
    num_rejected_prediction: int = 0  # ... or wrong
    denoising: Any = None  # decoding: the canvas under way; lost with the blocks
    priority: int = 0  # that of params, until it is changed
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt, then answer
    num_computed: int = 0  # tokens whose K and V lie in the cache
    # What the device still computes (engine.launching.launched_steps); all 0 where every step is waited for.
    num_launched: int = 0  # tokens after num_computed, the last of them perhaps not known yet
    num_under_way: int = 0  # steps that it takes part in
    chosen_row: int = 0  # of the last of them: where the token lies that it chooses
    num_late: int = 0  # times that such a step took a token which was not the one chosen in the end
    num_cached: int | None = None  # prompt tokens taken from the prefix cache; None: not started yet
    num_preemptions: int = 0
    served_in: int = 0  # number of the last step it took part in
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of prompt tokens 1, 2, ...
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    error: KvarnError | None = None
    is_cancel_requested: bool = False
    submitted_at: float = 0.0
    deadline_at: float = math.inf  # inf: none
    started_at: float | None = None  # for the first time
    first_token_at: float | None = None
    num_first: int = 1  # tokens that came with the first
    ended_at: float | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[len(self.prompt_ids) :])

    @property
    def num_remaining(self) -> int:
        """Tokens to compute until the longest answer this request may give."""
        return self.max_total_tokens - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """More than the last token is missing from the cache."""
        return self.num_computed + self.num_launched + 1 < len(self.token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some of the prompt is still to be scored; choice 0 scores for all its forks."""
        is_asked = self.params.prompt_logprobs is not None and self.choice == 0
        return is_asked and len(self.prompt_logprobs) < len(self.prompt_ids) - 1

    @property
    def is_silent(self) -> bool:
        """Nobody is told of its tokens, and no stop string is looked for: its text is read when it ends."""
        return (self.is_polled or not self.is_streamed) and not self.params.stop

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED

    @property
    def phase(self) -> Phase:
        """How far the request has got."""
        if self.num_output:
            return "decode"
        return "queued" if self.started_at is None else "prefill"

    def append(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Take one committed token of the answer."""
        if self.first_token_at is None:
            self.first_token_at = self.clock()
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)

    def start(self, num_computed: int = 0) -> None:
        """Run, for the first time or again, from num_computed tokens that lie in the cache already."""
        self._enter(RequestState.RUNNING)
        self.num_computed = num_computed
        if self.started_at is None:
            self.started_at = self.clock()
            self.num_cached = num_computed

    def preempt(self) -> None:
        """Give the blocks back and wait again; tokens chosen so far stay."""
        self._enter(RequestState.WAITING)
        self.num_computed = self.num_launched = 0
        self.num_preemptions += 1

    def finish(self, finish: Finish) -> None:
        self._end(RequestState.FINISHED, finish)

    def fail(self, error: KvarnError) -> None:
        self.error = error
        self._end(RequestState.FAILED, Finish(FinishReason.FAILED))

    def cancel(self) -> None:
        self.error = Cancelled(f"request {self.id} was cancelled")
        self._end(RequestState.CANCELLED, Finish(FinishReason.CANCELLED))

    def expire(self) -> None:
        """The deadline passed: what was said so far is the result."""
        self.error = DeadlineExceeded(f"request {self.id} did not end within its {self.params.deadline_s:g} s")
        self._end(RequestState.CANCELLED, Finish(FinishReason.DEADLINE))

    def completion(self, text: str) -> Completion:
        """The result of an ended request."""
        assert self.finish_reason is not None
        has_scores = self.params.prompt_logprobs is not None and self.choice == 0
        return Completion(
            text=text,
            token_ids=self.output_ids,
            finish_reason=self.finish_reason,
            usage=Usage(
                len(self.prompt_ids),
                self.num_output,
                self.num_cached or 0,
                self.num_accepted_prediction,
                self.num_rejected_prediction,
            ),
            timings=self._timings(),
            seed=self.seed,
            stop_match=self.stop_match,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs) if has_scores else None,
        )

    def _timings(self) -> Timings:
        end = self.ended_at if self.ended_at is not None else self.clock()
        start = self.started_at if self.started_at is not None else end
        first = self.first_token_at if self.first_token_at is not None else end
        return Timings(
            queue_s=start - self.submitted_at,
            prefill_s=first - start,
            decode_s=end - first,
            first_token_s=first - self.submitted_at,
            num_first=self.num_first,
        )

    def _end(self, state: RequestState, finish: Finish) -> None:
        self._enter(state)
        self.finish_reason, self.stop_match = finish.reason, finish.match
        self.adapters = ()  # the next owner of their memory need not wait for whoever keeps this
        self.ended_at = self.clock()

    def _enter(self, state: RequestState) -> None:
        assert state in TRANSITIONS[self.state], f"request {self.id}: {self.state} -> {state}"
        self.state = state


def draw_seed() -> int:
    """A seed for a request that named none; 63 bits, so that it can be passed back in."""
    return secrets.randbits(63)
