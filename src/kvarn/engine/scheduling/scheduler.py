"""Who runs next: plan() before the computation, apply() after it. Knows spans and blocks, never a tensor.

A request starts when its prompt fits; nothing is set aside for its answer. When blocks run out the policy's victim
gives its own back and waits again. The last in the policy's order is never a victim and fits alone, so all end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain

from kvarn.config import EngineConfig
from kvarn.decoding.decoder import Commit, Decoder
from kvarn.engine.scheduling.fairness import FairShare, StepShares
from kvarn.engine.scheduling.forks import ForkGroups
from kvarn.engine.scheduling.kv_allocation import KVAllocation
from kvarn.engine.scheduling.layerwise_prefill import LayerwisePrefill
from kvarn.engine.scheduling.pacing import Pacer
from kvarn.engine.scheduling.plan import BatchEntry, LayerwisePart, StepPlan, make_plan
from kvarn.engine.scheduling.policy import make_policy
from kvarn.engine.scheduling.prefix_reuse import PrefixReuse
from kvarn.engine.scheduling.queue import RequestQueue
from kvarn.engine.scheduling.row_budget import RowBudget
from kvarn.errors import KvarnError
from kvarn.kv.cache import KVCache
from kvarn.request import Clock, Finish, Request

Draft = dict[str, BatchEntry]  # by request id, in the order of planning


class Scheduler:
    """Waiting and running requests over one KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        config: EngineConfig,
        *,
        publishes: bool = True,
        clock: Clock = time.perf_counter,
    ) -> None:
        """publishes: computed blocks may serve other requests, which holds for models that read left to right."""
        self.pacer = Pacer(config.max_stretch, config.prefill_ms / 1000, config.max_batch_tokens)
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.num_query_tokens = 0
        self._decoder = decoder
        self._kv = kv
        self._config = config
        self._clock = clock
        self._sharing = PrefixReuse(kv, finds_prefixes=publishes and config.prefix_cache)
        self._policy = make_policy(config, self.pacer.seconds_for)
        self._turns = FairShare(self._policy, self.pacer, config, clock)
        self._lane = LayerwisePrefill(config.max_batch_tokens)
        self._waiting = RequestQueue(self._policy.order)
        self._families = ForkGroups()
        self._budget = RowBudget(config.max_batch_tokens)
        self._holdings = KVAllocation(kv, decoder)
        self._running: dict[str, Request] = {}
        self._woken_at = 0.0  # when the first request came to the idle engine
        self._refused: tuple[str, int] | None = None  # the first in the queue, and the free blocks it found too few

    @property
    def has_work(self) -> bool:
        return bool(self._running or self.num_waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._families)

    def num_waiting_beside(self, priority: int) -> int:
        """Of those waiting: all but the ones that a request of this priority comes before."""
        now = self._clock()
        waiting = chain(self._waiting, self._families)
        return sum(not self._policy.is_background(request, priority, now) for request in waiting)

    @property
    def num_following(self) -> int:
        """Of those waiting: choices whose prompt another one computes."""
        return len(self._families)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def wait_s(self) -> float:
        """How long the first request of an idle engine still waits for company."""
        if self._running or not self.num_waiting or self.num_waiting >= self._config.max_running:
            return 0.0
        return max(0.0, self._woken_at + self._config.max_wait_ms / 1000 - self._clock())

    def submit(self, request: Request) -> None:
        """Queue a request; one that forks another waits for that one's prompt."""
        if not self.has_work:
            self._woken_at = request.submitted_at
        leader = request.fork_of
        if leader is not None and not leader.is_ended and leader.num_computed < leader.num_prompt:
            self._families.add(leader, request)
        else:
            self._waiting.push(request)

    def reprioritise(self, request: Request, priority: int) -> None:
        """Change the priority of a request, in whatever state it is."""
        request.priority = priority
        if request in self._waiting:
            self._waiting.rekey(request)

    def plan(self) -> StepPlan:
        """Decodes first, then prompt chunks, then newcomers, within the budgets of rows and time."""
        if self.wait_s > 0:
            return StepPlan()
        draft: Draft = {}
        turn = self._turns.take(self._running.values(), self._waiting.peek())
        if not self._decoder.cuts_spans:
            self._place_whole(draft, turn)
            return make_plan(list(draft.values()))
        for request in turn.decodes[: self._config.max_batch_tokens]:
            self._place(draft, request, 1)
        # A chunk whose request sits this step out, being of low priority, must not hold back anybody's prompt.
        gives_way = self._lane.gives_way or not self._lane.is_open_to(turn.prompts)
        has_prompt_rows = gives_way and self._place_prompts(draft, turn)
        slow = None if has_prompt_rows else self._slow_part(turn)
        if slow is None:
            self._lane.rest()
        return make_plan(list(draft.values()), slow)

    def apply(self, commits: Iterable[Commit], finishes: Sequence[Finish | None]) -> None:
        """Take what the step gave: tokens, findable blocks, then ends, and the blocks of the ended ones back."""
        for commit, finish in zip(commits, finishes, strict=True):
            request = commit.request
            if commit.error is not None:
                self.fail(request, commit.error)
                continue
            self._take(commit)
            if request.num_computed >= request.num_prompt:
                self._fork_followers(request)
            if finish is not None:
                request.finish(finish)
                self._forget(request)

    def observe(self, plan: StepPlan, seconds: float, slow_s: float = 0.0) -> None:
        """Learn how long a step took, and its slow part within it."""
        slow = None if plan.slow is None else plan.slow.entry.span.request
        self._turns.observe(plan.spans, seconds, slow, slow_s)

    def observe_slow(self, slow: LayerwisePart, piece_s: float, *, is_done: bool) -> None:
        """Learn how long the pieces of a chunk take."""
        if is_done:
            self._lane.learn(slow.seconds, piece_s)

    def abandon(self, plan: StepPlan) -> None:
        """Undo plan() after an interrupted step: nothing of it counts as computed."""
        for entry in (*plan.entries, *([] if plan.slow is None else [plan.slow.entry])):
            request = entry.span.request
            self._lane.leave(request)
            if request.id in self._running and (entry.copies or entry.span.reach is not None):
                self.preempt(request)  # nobody knows whether its copies were made, or what was written over
            elif request.id in self._running:
                self._kv.trim(request.id, request.num_computed)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits again, keeps its tokens and will come to the same end."""
        del self._running[request.id]
        self._lane.leave(request)
        self._holdings.release(request, forget=request.params.free_cache_on_finish)
        self._decoder.restart(request)
        request.preempt()
        self._waiting.push(request)
        self.num_preemptions += 1

    def fail(self, request: Request, error: KvarnError) -> None:
        request.fail(error)
        self._forget(request, forget=True)  # whatever it computed may be damaged

    def reap(self) -> list[Request]:
        """End the requests that were cancelled or are overdue, in whatever state they are."""
        now = self._clock()
        everybody = chain(self._waiting, self._families, self._running.values())
        ended = [request for request in everybody if request.is_cancel_requested or request.deadline_at <= now]
        for request in ended:
            if request.is_cancel_requested:
                request.cancel()
            else:
                request.expire()
            self._forget(request)
        return ended

    def _place(self, draft: Draft, request: Request, max_rows: int) -> int:
        """Put a running request's next rows into the draft; returns their number."""
        entry = self._entry(draft, request, max_rows)
        if entry is None:
            return 0
        draft[request.id] = entry
        return entry.span.num_rows

    def _place_whole(self, draft: Draft, turn: StepShares) -> None:
        """Spans that cannot be cut: the least recently served first, then newcomers, within the budget of rows."""
        budget = self._budget
        budget.open()
        for request in sorted([*turn.decodes, *turn.prompts], key=lambda request: request.served_in):
            self._place_one(draft, request)
        while budget.has_rows and (waiting := self._waiting.peek()) is not None and self._start(draft, waiting):
            if self._turns.includes(waiting, self._running.values()):
                self._place_one(draft, waiting)
        if not draft and budget.first_refused is not None:
            self._place(draft, budget.first_refused, self._decoder.least_rows(budget.first_refused))
        budget.close()

    def _place_one(self, draft: Draft, request: Request) -> None:
        if request.id in self._running:  # and not dropped for somebody before it
            num_rows = self._budget.offer(request, self._decoder.least_rows(request))
            self._budget.spend(self._place(draft, request, num_rows))

    def _place_prompts(self, draft: Draft, turn: StepShares) -> bool:
        """Prompt chunks, then newcomers, within the budgets of rows and time; whether there was anything to place."""
        if not (turn.prompts or self._waiting):
            return False
        num_rows = min(self._config.max_batch_tokens - len(draft), self._turns.prompt_rows(turn))
        budget = num_rows
        for request in sorted(turn.prompts, key=self._policy.order):
            if self._lane.holds(request):
                continue
            if not (turn.num_disturbed and self._lane.wants(request, budget)):
                budget -= self._place(draft, request, budget)
            elif (entry := self._entry(draft, request, self._lane.num_rows)) is not None:
                self._lane.enter(entry)
        return budget - self._start_waiting(draft, budget) < num_rows

    def _slow_part(self, turn: StepShares) -> LayerwisePart | None:
        seconds = self._turns.extra_s(turn)
        if seconds == 0 or not self._lane.is_open_to(turn.prompts):
            return None
        chunk, is_first = self._lane.go()
        return LayerwisePart(chunk.entry, seconds, is_first)

    def _entry(self, draft: Draft, request: Request, max_rows: int) -> BatchEntry | None:
        """The next rows of a running request and the blocks for them, others' if need be."""
        if max_rows <= 0 or request.id not in self._running:
            return None
        span = self._decoder.span(request, max_rows)
        if span is None:
            return None
        while (copies := self._holdings.extend(span)) is None:
            assert len(self._running) > 1, f"request {request.id} was accepted and does not fit alone"
            victim = self._policy.victim(self._running.values())
            self._drop(draft, victim)
            if victim is request:
                return None
        return self._holdings.entry(span, copies)

    def _drop(self, draft: Draft, victim: Request) -> None:
        draft.pop(victim.id, None)
        self.preempt(victim)

    def _start_waiting(self, draft: Draft, budget: int) -> int:
        """Start requests while there are rows for them, strictly in the queue's order; returns the rows taken."""
        num_rows = 0
        while num_rows < budget and (request := self._waiting.peek()) is not None:
            if not self._start(draft, request):
                break
            if self._turns.includes(request, self._running.values()):
                num_rows += self._place(draft, request, budget - num_rows)
        return num_rows

    def _start(self, draft: Draft, request: Request) -> bool:
        if self._running and self._refused == (request.id, self._kv.num_free):
            return False  # nothing has changed since it found too few
        while len(self._running) >= self._config.max_running:
            if not self._displace(draft, request):
                return False
        leader = request.fork_of if request.fork_of and self._can_fork(draft, request.fork_of) else None
        num_computed = self._sharing.take_over(request, leader)
        if self._sharing.is_being_computed(request, num_computed, self._computing(draft)):
            self._kv.release(request.id)
            return False
        while not self._holdings.fits(request, num_computed, self._running.values()):
            if not self._displace(draft, request):
                self._kv.release(request.id)
                self._refused = (request.id, self._kv.num_free)
                return False
        self._waiting.remove(request)
        self._run(request, num_computed)
        return True

    def _run(self, request: Request, num_computed: int) -> None:
        is_first = request.started_at is None
        request.start(num_computed)
        self._running[request.id] = request
        if is_first:
            self.num_hit_tokens += num_computed
            self.num_query_tokens += request.num_prompt if num_computed or self._sharing.may_share(request) else 0

    def _displace(self, draft: Draft, request: Request) -> bool:
        """Make room for a waiting request by taking a lower one's place, if there is one."""
        if not self._running:
            return False
        victim = self._policy.victim(self._running.values())
        if not self._policy.may_displace(request, victim):
            return False
        self._drop(draft, victim)
        return True

    def _can_fork(self, draft: Draft, leader: Request) -> bool:
        """A copy that is still to be made would be lost with a leader dropped from the draft: do not build on it."""
        return leader.id in self._running and not (leader.id in draft and draft[leader.id].copies)

    def _computing(self, draft: Draft) -> list[Request]:
        """Whose rows this step computes, as far as it is planned."""
        planned = [entry.span.request for entry in draft.values()]
        return planned if self._lane.chunk is None else [*planned, self._lane.chunk.request]

    def _take(self, commit: Commit) -> None:
        request = commit.request
        self._lane.leave(request)
        request.num_computed += commit.num_computed
        request.prompt_logprobs.extend(commit.prompt_logprobs)
        self._sharing.publish(request)
        if len(commit.tokens) > 1 and request.num_output == 0:
            request.num_first = len(commit.tokens)
        for token in commit.tokens:
            request.append(token.token_id, token.logprob)

    def _fork_followers(self, leader: Request) -> None:
        """The prompt is computed: its other choices start on it, or queue when too many run."""
        for follower in self._families.take(leader):
            if leader.num_prompt == 1 or len(self._running) >= self._config.max_running:
                self._waiting.push(follower)
                continue
            self._kv.fork(follower.id, leader.id, leader.num_prompt - 1)
            self._run(follower, leader.num_prompt - 1)

    def _forget(self, request: Request, *, forget: bool = False) -> None:
        """Let an ended request go; if it leaves followers, the first of them leads the others."""
        self._lane.leave(request)
        if self._running.pop(request.id, None) is None:
            if request in self._waiting:
                self._waiting.remove(request)
            else:
                self._families.discard(request)
        self._holdings.release(request, forget=forget or request.params.free_cache_on_finish)
        self._decoder.forget(request)
        followers = self._families.take(request)
        for follower in followers[1:]:
            self._families.add(followers[0], follower)
        if followers:
            self._waiting.push(followers[0])
