"""Who runs next: plan() before the computation, apply() after it. Knows spans and blocks, never a tensor.

A request starts when its prompt fits; nothing is reserved for its answer. When blocks run out, the policy's victim is
preempted and waits again. The last one in the policy's order is never a victim and fits alone, so every request ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from kvarn.config import EngineConfig
from kvarn.decoding.decoder import Commit, Decoder, Span, failed_commit
from kvarn.engine.launching.decode_rows import PlainTokens, SteadyDecodes
from kvarn.engine.scheduling.commit_applier import CommitApplier
from kvarn.engine.scheduling.fairness import FairShare, StepShares
from kvarn.engine.scheduling.layerwise_prefill import LayerwisePrefill
from kvarn.engine.scheduling.live_requests import LiveRequests
from kvarn.engine.scheduling.pacing import Pacer
from kvarn.engine.scheduling.plan import BatchEntry, Draft, LayerwisePart, StepPlan, make_plan
from kvarn.engine.scheduling.policy import make_policy
from kvarn.engine.scheduling.prefix_reuse import PrefixReuse
from kvarn.engine.scheduling.row_budget import RowBudget
from kvarn.engine.scheduling.starter import Starter
from kvarn.kv.cache import KVCache
from kvarn.request import Clock, Request


class Scheduler:
    """Plans the steps of the requests over one KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        config: EngineConfig,
        *,
        publishes: bool = True,
        clock: Clock = time.perf_counter,
        prompt_rows: tuple[int, int] = (1, 0),
    ) -> None:
        """publishes: computed blocks may serve others, as with models that read left to right; prompt_rows: Pacer's."""
        max_rows = config.max_batch_tokens
        self.pacer = Pacer(config.max_stretch, config.prefill_ms / 1000, max_rows, *prompt_rows)
        self.prefix_reuse = PrefixReuse(kv, finds_prefixes=publishes and config.prefix_cache)
        self._decoder = decoder
        self._kv = kv
        self._config = config
        self._clock = clock
        self._policy = make_policy(config, self.pacer.seconds_for)
        self._fairness = FairShare(self._policy, self.pacer, config, clock, decoder)
        self._layerwise = LayerwisePrefill(config.max_batch_tokens)
        self._live = LiveRequests(decoder, kv, self._layerwise, self._policy.order, self.prefix_reuse.restores)
        self._row_budget = RowBudget(config.max_batch_tokens)
        self._failed: list[Request] = []  # by plan(); reap() tells
        self._first_submitted_at = 0.0  # of the requests since the engine was idle
        self._steady = SteadyDecodes(decoder, kv)
        self._starter = Starter(self._live, self.prefix_reuse, self._policy, config.max_running)
        self._commits = CommitApplier(self._live, self.prefix_reuse, self._starter, config.max_running)

    @property
    def has_work(self) -> bool:
        return bool(self._live.running or self.num_waiting or self._failed)

    @property
    def num_waiting(self) -> int:
        return self._live.num_waiting

    def num_waiting_beside(self, priority: int) -> int:
        """Waiting requests, without those that a request of this priority overtakes."""
        now = self._clock()
        waiting = [*self._live.waiting, *self._live.forks]
        return sum(not self._policy.is_background(request, priority, now) for request in waiting)

    @property
    def num_forks(self) -> int:
        """Of the waiting requests: choices whose prompt another one computes."""
        return len(self._live.forks)

    @property
    def num_running(self) -> int:
        return len(self._live.running)

    @property
    def num_preemptions(self) -> int:
        """Ever."""
        return self._live.num_preemptions

    @property
    def wait_s(self) -> float:
        """How long the first request of an idle engine still waits for others to share its first step."""
        if self._live.running or not self.num_waiting or self.num_waiting >= self._config.max_running:
            return self._live.restoring_s
        return max(self._live.restoring_s, self._first_submitted_at + self._config.max_wait_ms / 1000 - self._clock())

    def requests(self) -> Iterator[Request]:
        """All requests that have not ended."""
        return iter(self._live)

    def submit(self, request: Request) -> None:
        """Queue a request; one that forks another waits for that one's prompt."""
        if not self.has_work:
            self._first_submitted_at = request.submitted_at
        self._live.add(request)

    def reprioritise(self, request: Request, priority: int) -> None:
        """Change the priority of a request, in whatever state it is."""
        request.priority = priority
        self._starter.forget_refusal()
        if request in self._live.waiting:
            self._live.waiting.rekey(request)

    def plan(self, newest: StepPlan | None = None) -> StepPlan:
        """Decodes, then prompt chunks, then waiting requests, within budgets of rows and time; newest: last step."""
        self._live.queue_restored()
        if self.wait_s > 0:
            return StepPlan()
        draft: Draft = {}
        try:
            return self._plan(draft, newest)
        except BaseException:  # Ctrl-C: as if it had not begun
            self._undo(draft.values())
            raise

    def _plan(self, draft: Draft, newest: StepPlan | None) -> StepPlan:
        self._live.allocation.begin_plan()
        self._start_highest(draft)
        shares = self._fairness.take(self._live.running.values(), self._live.waiting.peek())
        if not self._decoder.has_divisible_spans:
            self._place_whole_spans(draft, shares)
            return make_plan(list(draft.values()))
        num_drafts = self._fairness.num_drafts(shares, self._live)
        if not num_drafts and (steady := self._steady_plan(newest, shares)) is not None:
            self._layerwise.rest()
            return steady
        for request in shares.decodes[: self._config.max_batch_tokens]:
            self._place(draft, request, 1 + num_drafts.get(request.id, 0))
        # A chunk whose low-priority request sits this step out must not hold back other prompts.
        gives_way = self._layerwise.gives_way or not self._layerwise.is_open_to(shares.prompts)
        has_prompt_rows = gives_way and self._place_prompts(draft, shares)
        layerwise = None if has_prompt_rows else self._layerwise_part(shares)
        if layerwise is None:
            self._layerwise.rest()
        return make_plan(list(draft.values()), layerwise)

    def apply(self, commits: Iterable[Commit]) -> None:
        """Take what the step gave: tokens, publishable blocks, then ends, whose blocks are freed."""
        self._commits.apply(commits)

    def append(self, plain: PlainTokens) -> None:
        """The same where all that happened to a request is one more token."""
        self._commits.append(plain)

    def observe(self, plan: StepPlan, seconds: float, layerwise_s: float = 0.0) -> None:
        """Learn how long a step took, and the layer-wise prefill within it."""
        self._fairness.observe(plan, seconds, layerwise_s)

    def observe_layerwise(self, part: LayerwisePart, piece_s: float) -> None:
        """A chunk is done: learn how long its pieces took."""
        self._layerwise.learn(part.seconds, piece_s)

    def abandon(self, plan: StepPlan) -> None:
        """Undo plan() after an interrupted step: nothing of it counts as computed."""
        self._undo((*plan.entries, *([] if plan.layerwise is None else [plan.layerwise.entry])))

    def _undo(self, entries: Iterable[BatchEntry]) -> None:
        for entry in list(entries):
            request = entry.span.request
            self._layerwise.leave(request)
            if request.id in self._live.running and (entry.copies or entry.span.reach is not None):
                self.preempt(request)  # it is unknown whether its copies were made, or what was overwritten
            elif request.id in self._live.running:
                self._kv.trim(request.id, request.num_computed + request.num_launched)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits again, keeps its tokens and will give the same answer."""
        self._live.preempt(request)

    def reap(self) -> list[Request]:
        """End the requests that were cancelled or are overdue, in whatever state they are; also those plan() ended."""
        failed, self._failed = self._failed, []
        return failed + self._live.reap(self._clock())

    def _steady_plan(self, newest: StepPlan | None, shares: StepShares) -> StepPlan | None:
        """One token more for all that decode, if there is nothing else to do."""
        is_too_long = len(shares.decodes) > self._config.max_batch_tokens
        if shares.prompts or is_too_long or not self._starter.is_closed_to(self._live.waiting.peek()):
            return None
        return self._steady.plan(shares.decodes, newest, self.num_preemptions)

    def _place(self, draft: Draft, request: Request, max_rows: int) -> int:
        """Put a running request's next rows into the draft; returns their number."""
        entry = self._entry(draft, request, max_rows)
        if entry is None:
            return 0
        draft[request.id] = entry
        return entry.span.num_rows

    def _place_whole_spans(self, draft: Draft, shares: StepShares) -> None:
        """Spans that cannot be divided: least recently served first, then waiting requests, within the row budget."""
        budget, waiting = self._row_budget, self._live.waiting
        budget.open()
        requests = [*shares.decodes, *self._with_higher(draft, shares.prompts, self._config.max_batch_tokens)]
        for request in sorted(requests, key=lambda request: request.served_in):
            self._place_whole(draft, request)
        while budget.has_rows and (first := waiting.peek()) is not None and self._start_in_order(draft, first):
            if self._fairness.includes([first], self._live.running.values()):
                self._place_whole(draft, first)
        if not draft and budget.first_refused is not None:
            self._place(draft, budget.first_refused, self._decoder.least_rows(budget.first_refused))
        budget.close()

    def _place_whole(self, draft: Draft, request: Request) -> None:
        if request.id in self._live.running:  # it may have been preempted for a request placed before it
            num_rows = self._row_budget.offer(request, self._decoder.least_rows(request))
            self._row_budget.spend(self._place(draft, request, num_rows))

    def _place_prompts(self, draft: Draft, shares: StepShares) -> bool:
        """Prompt chunks, then waiting requests, within the budgets of rows and time; whether any rows were placed."""
        if not (shares.prompts or self._live.waiting):
            return False
        num_rows = min(self._config.max_batch_tokens - len(draft), self._fairness.prompt_rows(shares))
        budget = num_rows
        for request in self._fairness.in_order(self._with_higher(draft, shares.prompts, num_rows)):
            if self._layerwise.holds(request):
                continue
            if not (shares.num_paced and self._layerwise.wants(request, budget)):
                budget -= self._place(draft, request, budget)
            elif (entry := self._entry(draft, request, self._layerwise.num_rows)) is not None:
                self._layerwise.enter(entry)
        return budget - self._start_waiting(draft, budget) < num_rows

    def _layerwise_part(self, shares: StepShares) -> LayerwisePart | None:
        seconds = self._fairness.extra_s(shares)
        if seconds == 0 or not self._layerwise.is_open_to(shares.prompts):
            return None
        chunk, is_first = self._layerwise.advance()
        return LayerwisePart(chunk.entry, seconds, is_first)

    def _entry(self, draft: Draft, request: Request, max_rows: int) -> BatchEntry | None:
        """The next rows of a running request and the blocks for them, preempting others if need be."""
        if max_rows <= 0 or request.id not in self._live.running:
            return None
        span = self._span(request, max_rows)
        if span is None:
            return None
        while (copies := self._live.extend(span)) is None:
            assert self.num_running > 1, f"request {request.id} was accepted and does not fit alone"
            victim = self._policy.victim(self._live.running.values())
            self._starter.drop(draft, victim)
            if victim is request:
                return None
        return self._live.allocation.entry(span, copies)

    def _span(self, request: Request, max_rows: int) -> Span | None:
        """The next rows of a request. What fails here is its own: it ends, and the plan goes on without it."""
        try:
            return self._decoder.span(request, max_rows)
        except BaseException as error:
            self.apply([failed_commit(request, "this answer cannot go on", error)])
            self._failed.append(request)
            return None

    def _start_waiting(self, draft: Draft, budget: int) -> int:
        """Start requests while there are rows for them, strictly in the queue's order; returns the rows taken."""
        num_rows = 0
        while num_rows < budget and (request := self._live.waiting.peek()) is not None:
            if not self._start_in_order(draft, request):
                break
            if self._fairness.includes([request], self._live.running.values()):
                num_rows += self._place(draft, request, budget - num_rows)
        return num_rows

    def _start_highest(self, draft: Draft) -> None:
        """A waiting request above all that run starts before the step is divided: at once they are its background."""
        first = self._live.waiting.peek()
        if first is not None and self._fairness.is_above_all(first, self._live.running.values()):
            self._starter.start(draft, first)

    def _with_higher(self, draft: Draft, prompts: Sequence[Request], max_rows: int) -> list[Request]:
        """The prompts of a step, and waiting requests that outrank one of them, which start."""
        found, num_rows, running = list(prompts), 0, self._live.running
        while num_rows < max_rows and (first := self._live.waiting.peek()) is not None:
            if not self._fairness.goes_first(first, prompts, running.values()) or not self._starter.start(draft, first):
                break
            found.append(first)
            num_rows += max(self._decoder.least_rows(first), len(first.token_ids) - first.num_computed)
        return found

    def _start_in_order(self, draft: Draft, request: Request) -> bool:
        """Start the first in the queue if it would get rows now, or if it stands before one that would.

        Started without rows it would only take a place and blocks.
        """
        running = self._live.running.values()
        is_included = self._fairness.includes([request], running)
        if not is_included and self._config.policy != "priority":  # with it, those behind are no higher
            is_included = self._fairness.includes(self._live.waiting, running)
        return is_included and self._starter.start(draft, request)
