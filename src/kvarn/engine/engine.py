"""The step: who runs, forward, choose, apply, tell. Owned by one thread at a time; holds no tensor."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from kvarn.backends.protocol import Backend
from kvarn.backends.resumable_forward import ResumableForward
from kvarn.config import EngineConfig
from kvarn.decoding.decoder import Commit, Decoder
from kvarn.engine.admission import Admission
from kvarn.engine.engine_arbiter import Demand
from kvarn.engine.rate_limit import RateLimiter
from kvarn.engine.scheduling.plan import BatchEntry, LayerwisePart, StepPlan, make_plan
from kvarn.engine.scheduling.scheduler import Scheduler
from kvarn.engine.stats import EngineStats, StepMeter, StepTiming
from kvarn.engine.stream import Stream
from kvarn.errors import BackendError, InvalidParameter
from kvarn.kv.cache import KVCache
from kvarn.request import Clock, Request, draw_seed
from kvarn.structured.constraints import Compiled
from kvarn.types import MAX_PRIORITY, SamplingParams, TokenEvent


class Engine:
    """Requests in, events out, one step at a time."""

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        kv: KVCache,
        *,
        stream: Stream,
        admission: Admission,
        config: EngineConfig,
        publishes: bool = True,
        clock: Clock = time.perf_counter,
    ) -> None:
        """publishes: a computed block may serve other requests; not so for models that also read to the right."""
        self.backend = backend
        self.decoder = decoder
        self.kv = kv
        self.stream = stream
        self.admission = admission
        self.config = config
        self.scheduler = Scheduler(decoder, kv, config, publishes=publishes, clock=clock)
        self._throttle = RateLimiter(config, clock)
        self._meter = StepMeter()
        self._clock = clock
        self._open: dict[str, Request] = {}
        self._numbers = itertools.count(1)
        self._forward_s = 0.0
        self._slow_s = 0.0  # of this step, for the chunk under way
        self._under_way: tuple[BatchEntry, ResumableForward] | None = None
        self._owed: list[TokenEvent] = []  # by a step that was interrupted

    @property
    def max_batch_tokens(self) -> int:
        return self.config.max_batch_tokens

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._owed)

    @property
    def wait_s(self) -> float:
        """Seconds for which step() will do nothing, because company is awaited (max_wait_ms)."""
        return self.scheduler.wait_s

    @property
    def demand(self) -> Demand:
        """What there is to do, for a fair share among the engines of the process."""
        return Demand(len(self._open), max((request.priority for request in self._open.values()), default=0))

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        starts_text: bool = False,
        tenant: str = "",
        visible_ids: frozenset[int] = frozenset(),
        constraint: Compiled | None = None,
        request_id: str | None = None,
        choice: int = 0,
        fork_of: Request | None = None,
    ) -> Request:
        """Queue one choice of a request, or refuse it at once with the numbers.

        For n > 1 submit choice 0, then the others with fork_of=choice 0: they start on its computed prompt.
        """
        number = next(self._numbers)
        request_id = f"r{number}" if request_id is None else request_id
        if request_id in self._open:
            raise InvalidParameter(f"request id {request_id!r:.60} is in use; give every request its own")
        if params.constraint is not None and constraint is None:
            raise InvalidParameter("the constraint was not compiled for this model; submit through kvarn.LLM")
        prompt, room = self.admission.admit(prompt_ids, params)
        admitted = self.decoder.admit(prompt, params, room)
        self._check_memory(admitted.lengths)
        seed = params.seed if params.seed is not None else draw_seed() if fork_of is None else fork_of.seed
        assert fork_of is None or fork_of.prompt_ids == prompt
        total, clock, leader = (
            len(prompt) + admitted.max_tokens,
            self._clock,
            fork_of if self.decoder.can_fork else None,
        )
        request = Request(request_id, prompt, params, total, seed, tenant, choice, leader, clock, number, constraint)
        self._throttle.admit(request, self.scheduler.num_waiting, self.scheduler.num_waiting_beside)
        # What a constraint allows is the text as it is: no space before its first word is taken away.
        self.stream.open(request, starts_text=starts_text and constraint is None, visible_ids=visible_ids)
        self._open[request.id] = request
        self.scheduler.submit(request)
        return request

    def _check_memory(self, lengths: Sequence[int]) -> None:
        """A request must fit alone: else it would wait for ever."""
        num_blocks = sum(map(self.kv.blocks_for, lengths))
        if num_blocks > self.kv.num_blocks:
            raise InvalidParameter(
                f"the request needs {num_blocks * self.kv.block_size:,} tokens of KV cache, which holds "
                f"{self.kv.max_tokens:,}; lower max_tokens, use another cache or no guidance, or raise kv_bytes="
            )

    def reprioritise(self, request: Request, priority: int) -> None:
        """Change the priority of a request that has not ended."""
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidParameter(f"priority is {priority}; give -{MAX_PRIORITY} to {MAX_PRIORITY}")
        self.scheduler.reprioritise(request, priority)

    def step(self) -> list[TokenEvent]:
        """Advance every request whose turn it is; what fails ends its own request, never the engine."""
        started_at, backend_s, self._slow_s = self._clock(), self._backend_s, 0.0
        events = self._owed = self.reap()
        if not self.scheduler.has_work or (plan := self.scheduler.plan()).is_empty:
            self._owed = []
            return events
        try:
            commits = self._compute(plan)
        except BaseException:  # Ctrl-C: as if the step had not begun
            self.scheduler.abandon(plan)
            raise
        readings = self.stream.read(commits)
        self.scheduler.apply([r.commit for r in readings], [r.finish for r in readings])
        events = events + self._close(self.stream.events(readings))
        self._owed = []
        self._measure(plan, commits, self._clock() - started_at, self._backend_s - backend_s)
        return events

    def reap(self) -> list[TokenEvent]:
        """End cancelled and overdue requests and free their blocks."""
        owed, self._owed = self._owed, []
        return owed + self._close(self.stream.end(self.scheduler.reap()))

    def stats(self) -> EngineStats:
        """What the engine holds and how fast it is."""
        scheduler, kv, meter = self.scheduler, self.kv.stats(), self._meter
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            blocks_total=kv.num_blocks,
            blocks_used=kv.used,
            blocks_cached=kv.cached,
            blocks_shared=kv.shared,
            prefix_hit_tokens=scheduler.num_hit_tokens,
            evictions=kv.evictions,
            preemptions=scheduler.num_preemptions,
            steps=meter.num_steps,
            retried_steps=meter.num_retried,
            prompt_tokens=meter.prompt_tokens,
            generated_tokens=meter.generated_tokens,
            tokens_per_s=meter.tokens_per_s,
            step_s=meter.step_s,
            overhead_share=meter.overhead_share,
            block_size=self.kv.block_size,
            waiting_for_prompt=scheduler.num_following,
            prefix_query_tokens=scheduler.num_query_tokens,
            denoise_steps=self.decoder.num_denoise_steps,
            distributions={"iteration_tokens_total": meter.step_tokens.snapshot(), **self.kv.histograms()},
        )

    @property
    def _backend_s(self) -> float:
        return self._forward_s + self.decoder.backend_s

    def _compute(self, plan: StepPlan) -> list[Commit]:
        plan = self._copy(plan)
        commits = [] if plan.batch is None else self._compute_batch(plan)
        return commits if plan.slow is None else commits + self._advance(plan.slow)

    def _compute_batch(self, plan: StepPlan) -> list[Commit]:
        """All requests at once; when that fails, each alone, so that only those at fault fail."""
        try:
            return self._forward(plan)
        except Exception:
            self._meter.num_retried += 1
            return [self._compute_alone(entry) for entry in plan.entries]

    def _copy(self, plan: StepPlan) -> StepPlan:
        """Make the plan's copies; when that fails, who needed one computes its blocks anew in a later step."""
        if not plan.copies:
            return plan
        try:
            self.backend.copy_blocks(plan.copies)
            return plan
        except Exception:
            for entry in plan.entries:
                if entry.copies:
                    self.scheduler.preempt(entry.span.request)
            slow = plan.slow
            if slow is not None and slow.copies:
                self.scheduler.preempt(slow.entry.span.request)
                slow = None
            return make_plan([entry for entry in plan.entries if not entry.copies], slow)

    def _forward(self, plan: StepPlan) -> list[Commit]:
        assert plan.batch is not None
        started_at = self._clock()
        hidden = self.backend.forward(plan.batch)
        self._forward_s += self._clock() - started_at
        return self.decoder.commit(plan.spans, hidden)

    def _advance(self, slow: LayerwisePart) -> list[Commit]:
        """Take a chunk some layers further; when that fails, compute it alone, so that it fails or not for itself."""
        started_at = self._clock()
        try:
            if self._under_way is None or self._under_way[0] is not slow.entry:
                batch = make_plan([slow.entry]).batch
                assert batch is not None
                self._under_way = (slow.entry, self.backend.begin(batch))
            passage = self._under_way[1]
            hidden = passage.advance(slow.seconds)
            commits = [] if hidden is None else self.decoder.commit([slow.entry.span], hidden)
        except Exception:
            self._meter.num_retried += 1
            self._under_way = None
            return [self._compute_alone(slow.entry)]
        self._slow_s = self._clock() - started_at
        self._forward_s += self._slow_s
        self.scheduler.observe_slow(slow, passage.piece_s, is_done=bool(commits))
        if commits:
            self._under_way = None
        return commits

    def _compute_alone(self, entry: BatchEntry) -> Commit:
        try:
            return self._forward(make_plan([entry]))[0]
        except Exception as error:
            return self._failed(entry, error)

    def _failed(self, entry: BatchEntry, error: Exception) -> Commit:
        failure = BackendError(f"the {self.backend.name} backend failed: {error or type(error).__name__}")
        failure.__cause__ = error
        return Commit(entry.span.request, 0, error=failure)

    def _close(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            if event.finish_reason is not None:
                self._throttle.settle(self._open.pop(event.request_id))
        return events

    def _measure(self, plan: StepPlan, commits: Sequence[Commit], seconds: float, backend_s: float) -> None:
        num_generated = sum(len(commit.tokens) for commit in commits)
        num_rows = sum(commit.num_computed for commit in commits)
        self._meter.add(StepTiming(seconds, backend_s, max(0, num_rows - num_generated), num_generated))
        self.scheduler.observe(plan, seconds, self._slow_s)
