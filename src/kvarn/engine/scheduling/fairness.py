"""Which requests take part in a step: low priorities sit out steps, prompts get rows by time, the highest first.

Knows priorities and times; knows no block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from kvarn.config import EngineConfig
from kvarn.decoding.decoder import Decoder, Span
from kvarn.engine.scheduling.live_requests import LiveRequests
from kvarn.engine.scheduling.pacing import BackgroundShare, Pacer, RecentPriority
from kvarn.engine.scheduling.plan import StepPlan, count_rows
from kvarn.engine.scheduling.policy import Policy
from kvarn.request import Clock, Request

Part = Literal["decodes", "prompts", "all"]


@dataclass(frozen=True, slots=True)
class StepShares:
    """The requests that take part in one step."""

    decodes: Sequence[Request]  # least recently served first
    prompts: Sequence[Request]
    num_disturbed: int  # decodes that prompt rows would slow down; low priorities are no reason to hold a prompt back
    num_paced: int  # the same, 0 where nobody reads along: then only the end of an answer matters


class FairShare:
    """Divides steps between running requests, and learns from each step."""

    def __init__(self, policy: Policy, pacer: Pacer, config: EngineConfig, clock: Clock, decoder: Decoder) -> None:
        self._policy = policy
        self._decoder = decoder
        self._max_rows = config.max_batch_tokens
        self._pacer = pacer
        self._clock = clock
        self._share = BackgroundShare(config.background_share, config.prefill_ms / 1000)
        self._recent = RecentPriority()
        self._background: frozenset[str] = frozenset()
        self._highest = math.inf  # no running request is above it
        self._is_owed = False  # low priorities run or wait beside higher ones, so they earn their share
        self._part: Part | None = None  # of the background in the step being planned ...
        self._extent = 1.0  # ... and how much of the time for prompts it may take
        self._prefers_decodes = False
        self._num_steps = 0

    def take(self, running: Collection[Request], first_waiting: Request | None) -> StepShares:
        """Choose the requests of the next step; first_waiting would start next."""
        top = max(map(_priority, running), default=None)
        self._recent.see(top, self._clock())
        self._highest = -math.inf if top is None else top
        self._background = self._find_background(running, top)
        is_low_waiting = first_waiting is not None and self._is_low(first_waiting, running)
        self._is_owed = is_low_waiting or bool(self._background)
        decodes, prompts, low_decodes, low_prompts = self._split(running)
        num_disturbed = len(decodes)
        has_prompts = bool(prompts) or (first_waiting is not None and not is_low_waiting)
        self._part = self._background_part(has_prompts, num_disturbed, bool(low_decodes))
        self._extent = self._share.extent(has_prompts, self._part == "prompts")
        if self._part in ("decodes", "all"):
            decodes += low_decodes[: self._num_low_decodes(num_disturbed, len(low_decodes))]
        if self._part == "all":
            prompts += low_prompts
        elif self._part == "prompts" and (low_prompts or is_low_waiting):
            prompts = low_prompts  # prompts of higher priorities wait for one step: else these would never get a row
        num_paced = num_disturbed if any(map(_is_streamed, decodes[:num_disturbed])) else 0
        return StepShares(sorted(decodes, key=_served_in), prompts, num_disturbed, num_paced)

    def num_drafts(self, shares: StepShares, live: LiveRequests) -> Mapping[str, int]:
        """Guessed tokens beside the decodes, by request: only where no prompt, no other rank and nobody who waits would
        find the step longer, and in blocks that nobody else will need."""
        speculation = self._decoder.speculation
        is_shared = shares.prompts or live.num_waiting or shares.num_disturbed < len(shares.decodes)
        if speculation is None or is_shared:
            return {}
        return speculation.plan(shares.decodes, min(live.num_spare_slots, self._max_rows - len(shares.decodes)))

    def prompt_rows(self, shares: StepShares) -> int:
        """How many prompt rows a step may have, by the time they take from others."""
        if self._part == "prompts":
            return self._pacer.background_rows(shares.num_disturbed, self._extent)
        rows = self._pacer.prompt_rows(shares.num_paced)
        if self._recent.is_expected:
            rows = min(rows, self._pacer.short_rows(shares.num_disturbed))
        return rows if self._part != "decodes" else math.ceil((1 - self._extent) * rows)

    def extra_s(self, shares: StepShares) -> float:
        """The same in seconds, for a chunk that goes through the layers in pieces."""
        if self._part == "prompts":
            return self._pacer.background_extra_s(shares.num_disturbed, self._extent)
        seconds = self._pacer.extra_s(shares.num_paced)
        if self._recent.is_expected:
            seconds = min(seconds, self._pacer.short_s)
        return seconds if self._part != "decodes" else (1 - self._extent) * seconds

    def includes(self, requests: Iterable[Request], running: Collection[Request]) -> bool:
        """Whether one of these would take part in the step if it started."""
        if self._part in ("prompts", "all"):
            return True
        highest = max((one.priority for one in requests), default=-math.inf)
        if highest >= self._highest:  # without looking at all that run, for each of hundreds that start
            self._highest = highest  # it may run from now on
            return True
        top, now = max((other.priority for other in running), default=-math.inf), self._clock()
        return any(one.priority >= top or not self._policy.is_background(one, int(top), now) for one in requests)

    def is_above_all(self, waiting: Request, running: Collection[Request]) -> bool:
        """Whether a waiting request makes low priorities of some that run, and none of them is as high."""
        is_higher = all(waiting.priority > other.priority for other in running)
        return is_higher and self._is_above_one(waiting, running)

    def goes_first(self, waiting: Request, prompts: Collection[Request], running: Collection[Request]) -> bool:
        """Whether a waiting request gets rows of this step before one of the prompts in it."""
        if self._part == "prompts" and not self._is_low(waiting, running):
            return False  # the step is for low priorities
        return self.includes([waiting], running) and self._is_above_one(waiting, prompts)

    def in_order(self, prompts: Collection[Request]) -> list[Request]:
        """The prompts of a step in the order in which they get rows: whoever is low beside another comes after it."""
        found: list[Request] = []
        left, now = sorted(prompts, key=self._policy.order), self._clock()
        while left:
            top = max(request.priority for request in left)
            low = [one for one in left if one.priority < top and self._policy.is_background(one, top, now)]
            found += [request for request in left if request not in low] if low else left
            left = low
        return found

    def observe(self, plan: StepPlan, seconds: float, layerwise_s: float = 0.0) -> None:
        """Learn from the last step; layerwise_s of its seconds went into its layer-wise part."""
        self._num_steps += 1
        layerwise = None if plan.layerwise is None else plan.layerwise.entry.span.request
        requests = plan.requests
        for request in requests if layerwise is None else [*requests, layerwise]:
            request.served_in = self._num_steps
        is_mixed = bool(self._background) and any(request.id in self._background for request in requests)
        if self._is_owed:
            background_s = self._background_s(plan.spans, seconds - layerwise_s) if is_mixed else 0.0
            if layerwise is not None and layerwise.id in self._background:
                background_s += layerwise_s
            self._share.settle(seconds, background_s)
        speculation = self._decoder.speculation
        seconds -= 0.0 if speculation is None else speculation.take_drafting_s()
        num_drafts, (num_decodes, num_prompt_rows) = plan.num_drafts, plan.row_counts
        if requests and not num_drafts:  # a step with drafts is longer than those that prompts are measured against
            self._pacer.observe(num_decodes, num_prompt_rows, seconds - layerwise_s, steers=not is_mixed)
        if num_decodes and not num_prompt_rows and layerwise is None and speculation is not None:
            speculation.observe(num_decodes + num_drafts, seconds)

    def _background_part(self, has_prompts: bool, num_disturbed: int, has_low_decodes: bool) -> Part | None:
        """What low priorities may do in this step beside higher ones; None: they sit it out.

        Decodes or prompts, alternating: both together would make a long step. Beside prompts of higher priorities
        decodes are preferred, which leave those most of the rows.
        """
        if not self._is_owed:
            self._share.reset()
            return "all" if self._share.is_full else None
        if not self._share.may_run(has_prompts):
            return None
        if num_disturbed == 0 or self._share.is_full:
            return "all"
        if self._pacer.wants_base(num_disturbed):
            return None
        self._prefers_decodes = has_low_decodes and (has_prompts or not self._prefers_decodes)
        return "decodes" if self._prefers_decodes else "prompts"

    def _num_low_decodes(self, num_disturbed: int, num_wanted: int) -> int:
        if self._part == "all":
            return num_wanted
        return self._pacer.background_decodes(num_disturbed, num_wanted, self._extent)

    def _is_low(self, request: Request, running: Collection[Request]) -> bool:
        top = max((other.priority for other in running), default=request.priority)
        return request.priority < top and self._policy.is_background(request, top, self._clock())

    def _is_above_one(self, request: Request, others: Iterable[Request]) -> bool:
        priority, now = request.priority, self._clock()
        return any(o.priority < priority and self._policy.is_background(o, priority, now) for o in others)

    def _split(self, running: Collection[Request]) -> list[list[Request]]:
        """Decodes, least recently served first, and prompts; then the same of the background."""
        left, background = running, []
        if self._background:
            background = [request for request in running if request.id in self._background]
            left = [request for request in running if request.id not in self._background]
        return [*_split(left), *_split(background)]

    def _find_background(self, running: Collection[Request], top: int | None) -> frozenset[str]:
        if top is None or min(map(_priority, running)) == top:
            return frozenset()
        lower, now = [request for request in running if request.priority < top], self._clock()
        return frozenset(request.id for request in lower if self._policy.is_background(request, top, now))

    def _background_s(self, spans: Sequence[Span], seconds: float) -> float:
        """What low priorities took from the others: what the step lasted longer than it would have without them."""
        higher = [span for span in spans if span.request.id not in self._background]
        if not higher or len(higher) == len(spans):
            return 0.0
        expected_s = self._pacer.expected_s(*count_rows(higher))
        if expected_s is not None:
            return max(0.0, seconds - expected_s)
        return seconds * (1 - sum(count_rows(higher)) / sum(count_rows(spans)))


def _split(requests: Collection[Request]) -> tuple[list[Request], list[Request]]:
    """Decodes, least recently served first, and prompts."""
    prompts = [request for request in requests if request.is_prefilling]
    decodes = [request for request in requests if not request.is_prefilling] if prompts else requests
    return sorted(decodes, key=_served_in), prompts


_priority: Callable[[Request], int] = attrgetter("priority")  # a third of the time of a function
_served_in: Callable[[Request], int] = attrgetter("served_in")
_is_streamed: Callable[[Request], bool] = attrgetter("is_streamed")
