"""The step: plan, copy blocks, forward, sample, apply, events; launched ahead where a backend can. Holds no tensor."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence

from kvarn.backends.protocol import Backend
from kvarn.backends.resumable_forward import ResumableForward
from kvarn.checks import check_parameter
from kvarn.config import EngineConfig
from kvarn.decoding.decoder import Commit, Decoder
from kvarn.engine.admission import Admission
from kvarn.engine.engine_arbiter import Demand
from kvarn.engine.launching.decode_rows import NO_PLAIN_TOKENS, PlainTokens, compute_decodes
from kvarn.engine.launching.launched_steps import LaunchedSteps, with_known_tokens
from kvarn.engine.scheduling.plan import BatchEntry, LayerwisePart, StepPlan, make_plan
from kvarn.engine.scheduling.rate_limit import RateLimiter
from kvarn.engine.scheduling.scheduler import Scheduler
from kvarn.engine.stats import EngineStats, StepMeter, StepTiming, engine_stats
from kvarn.engine.stream import Stream
from kvarn.engine.submission import Submission
from kvarn.errors import BackendError, DeviceLost
from kvarn.kv.cache import KVCache
from kvarn.request import Clock, Request, draw_seed
from kvarn.types import MAX_PRIORITY, TokenEvent

log = logging.getLogger("kvarn.engine")


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
        rows = backend.min_prompt_rows, backend.free_prompt_rows
        self.scheduler = Scheduler(decoder, kv, config, publishes=publishes, clock=clock, prompt_rows=rows)
        self._rate_limiter = RateLimiter(config, clock)
        self._launched = LaunchedSteps(decoder)
        self._meter = StepMeter()
        self._clock = clock
        self._numbers = itertools.count(1)
        self._step_started = (0.0, 0.0)  # the clock and _backend_s then
        self._forward_s = self._layerwise_s = 0.0  # the latter: of this step, for the layer-wise prefill
        self._layerwise: tuple[BatchEntry, ResumableForward] | None = None  # the chunk under way
        self._undelivered: list[TokenEvent] = []  # events of a step that was interrupted
        self._newest: StepPlan | None = None  # the last step, under way or done
        self.offer_turn: Callable[[], None] = lambda: None  # called between parts of a long function of compute()

    @property
    def max_batch_tokens(self) -> int:
        return self.config.max_batch_tokens

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._undelivered or self._launched)

    @property
    def wait_s(self) -> float:
        """Seconds for which step() will do nothing, because it waits for more requests (max_wait_ms)."""
        return self.scheduler.wait_s

    @property
    def demand(self) -> Demand:
        """What there is to do, for a fair share among the engines of the process."""
        priorities = [request.priority for request in self.scheduler.requests()]
        return Demand(len(priorities), max(priorities, default=0))

    def submit(self, submission: Submission) -> tuple[Request, ...]:
        """Queue the n answers to one prompt, or refuse all at once; those after the first start on its prompt."""
        submission = self.admission.admit(submission)
        requests = [self.submit_choice(submission)]
        try:
            for choice in range(1, submission.params.n):
                requests.append(self.submit_choice(submission, choice, requests[0]))
        except BaseException:
            for request in requests:
                request.is_cancel_requested = True
            raise
        return tuple(requests)

    def submit_choice(self, submission: Submission, choice: int = 0, fork_of: Request | None = None) -> Request:
        """Queue one of the n answers; fork_of: the first of them, on whose prompt this one starts."""
        submission = self.admission.admit(submission)
        admitted, params, number = submission.admitted, submission.params, next(self._numbers)
        assert admitted is not None
        assert fork_of is None or fork_of.prompt_ids == admitted.prompt_ids
        seed = params.seed if params.seed is not None else draw_seed() if fork_of is None else fork_of.seed
        now = self._clock()
        request = Request(
            f"r{number}" if fork_of is None else f"{fork_of.id}.{choice}",
            admitted.prompt_ids,
            params,
            admitted.max_total_tokens,
            seed,
            tenant=submission.tenant,
            prefix_salt=submission.prefix_salt,
            prefix_marks=submission.prefix_marks if choice == 0 else (),
            adapters=submission.adapters,
            choice=choice,
            fork_of=fork_of if self.decoder.can_fork else None,
            clock=self._clock,
            number=number,
            constraint=submission.constraint,
            prediction_ids=submission.prediction_ids,
            slots=submission.slots,
            is_streamed=submission.is_streamed,
            token_ids=list(admitted.prompt_ids),
            priority=params.priority,
            submitted_at=now,
            deadline_at=math.inf if params.deadline_s is None else now + params.deadline_s,
        )
        self.stream.open(request, submission)  # before it is charged: what fails here costs nothing
        self._rate_limiter.admit(request, self.scheduler.num_waiting, self.scheduler.num_waiting_beside)
        self.scheduler.submit(request)
        return request

    def reprioritise(self, request: Request, priority: int) -> None:
        """Change the priority of a request that has not ended."""
        check_parameter.integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        self.scheduler.reprioritise(request, priority)

    def step(self) -> list[TokenEvent]:
        """Advance the requests that the scheduler chooses; what fails ends its own request, never the engine."""
        self._layerwise_s = 0.0
        if not self._launched:  # else the time since the last one was read counts
            self._step_started = (self._clock(), self._backend_s)
        events = self._undelivered = self.reap()
        newest, self._newest = self._newest, None
        plan = self.scheduler.plan(newest) if self.scheduler.has_work else StepPlan()
        has_older = bool(self._launched)
        is_launched = self._launched.takes(plan) and self._launch(plan)
        if has_older:
            events = self._undelivered = events + self._read_launched()
            plan = plan if is_launched else with_known_tokens(plan)
        if not is_launched and not plan.is_empty:
            events = events + self._finish(plan, *self._compute(plan))
        self._undelivered, self._newest = [], plan if self.scheduler.has_work else None
        return events

    def reap(self) -> list[TokenEvent]:
        """End cancelled and overdue requests and free their blocks."""
        undelivered, self._undelivered = self._undelivered, []
        ended = self.scheduler.reap()
        for request in ended:
            self._rate_limiter.settle(request)
        return undelivered + self.stream.end(ended)

    def stats(self) -> EngineStats:
        """What the engine holds and how fast it is."""
        return engine_stats(self.scheduler, self.kv, self.decoder, self._meter)

    @property
    def _backend_s(self) -> float:
        return self._forward_s + self.decoder.backend_s

    def _launch(self, plan: StepPlan) -> bool:
        """Begin a step that is read in a later one; False: it failed, and is to be computed as any other."""
        try:
            if copies := plan.copies:
                self.backend.copy_blocks(copies)
            self._launched.launch(plan)
        except Exception as error:
            log.warning("a step could not be launched: %s", error or type(error).__name__)
            self._meter.num_retried += 1
            return False
        except BaseException:
            self.scheduler.abandon(plan)
            raise
        return True

    def _read_launched(self) -> list[TokenEvent]:
        """Take what the oldest step under way gave; when that fails, all under way is computed again, one by one."""
        later: list[StepPlan] = []
        try:
            plan, commits, plain = self._launched.read()
        except Exception:
            self._meter.num_retried += 1
            plan, *later = self._launched.discard()
            plan, plain = with_known_tokens(plan), NO_PLAIN_TOKENS
            commits = [self._compute_alone(entry) for entry in plan.entries]
        events = self._finish(plan, commits, plain)
        for undone in later:
            self.scheduler.abandon(undone)
        return events

    def _finish(self, plan: StepPlan, commits: list[Commit], plain: PlainTokens = NO_PLAIN_TOKENS) -> list[TokenEvent]:
        """Tokens become text and events, and ends free their blocks."""
        self.scheduler.append(plain)
        told, failed = self.stream.tell_plain(plain)
        commits, events = self.stream.tell(failed + commits, self.scheduler.apply)
        for request in [commit.request for commit in commits if commit.request.is_ended]:
            self._rate_limiter.settle(request)
        self._measure(plan, commits, len(plain))
        return told + events

    def _compute(self, plan: StepPlan) -> tuple[list[Commit], PlainTokens]:
        try:
            plan = self._copy(plan)
            commits, plain = self._compute_batch(plan)
            return commits if plan.layerwise is None else commits + self._advance(plan.layerwise), plain
        except BaseException:  # Ctrl-C: as if the step had not begun
            self.scheduler.abandon(plan)
            raise

    def _compute_batch(self, plan: StepPlan) -> tuple[list[Commit], PlainTokens]:
        """All requests at once; when that fails, each alone, so that only those at fault fail."""
        try:
            if plan.decodes is None or self.backend.runs_ahead:  # then a launch has failed
                return [] if plan.batch is None else self._forward(plan), NO_PLAIN_TOKENS
            return compute_decodes(plan.decodes, self.decoder)
        except Exception:
            self._meter.num_retried += 1
            return [self._compute_alone(entry) for entry in plan.entries], NO_PLAIN_TOKENS

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
            layerwise = plan.layerwise
            if layerwise is not None and layerwise.copies:
                self.scheduler.preempt(layerwise.entry.span.request)
                layerwise = None
            return make_plan([entry for entry in plan.entries if not entry.copies], layerwise)

    def _forward(self, plan: StepPlan) -> list[Commit]:
        assert plan.batch is not None
        started_at = self._clock()
        hidden = self.backend.forward(plan.batch)
        self._forward_s += self._clock() - started_at
        return self.decoder.commit(plan.spans, hidden)

    def _advance(self, part: LayerwisePart) -> list[Commit]:
        """Compute some more layers of a chunk; when that fails, compute the chunk alone, so that only it may fail."""
        started_at = self._clock()
        try:
            if self._layerwise is None or self._layerwise[0] is not part.entry:
                batch = make_plan([part.entry]).batch
                assert batch is not None
                self._layerwise = (part.entry, self.backend.begin(batch))
            forward = self._layerwise[1]
            hidden = forward.advance(part.seconds)
            commits = [] if hidden is None else self.decoder.commit([part.entry.span], hidden)
        except Exception:
            self._meter.num_retried += 1
            self._layerwise = None
            return [self._compute_alone(part.entry)]
        self._layerwise_s = self._clock() - started_at
        self._forward_s += self._layerwise_s
        if commits:
            self.scheduler.observe_layerwise(part, forward.piece_s)
            self._layerwise = None
        return commits

    def _compute_alone(self, entry: BatchEntry) -> Commit:
        try:
            (commit,) = self._forward(make_plan([entry.without_drafts()]))  # a guess is no reason to fail
            return commit._replace(num_rejected=entry.span.num_drafts)
        except DeviceLost:
            raise  # no other request would fare better
        except Exception as error:
            failure = BackendError(f"the {self.backend.name} backend failed: {error or type(error).__name__}")
            failure.__cause__ = error
            return Commit(entry.span.request, 0, error=failure)

    def _measure(self, plan: StepPlan, commits: Sequence[Commit], num_plain: int) -> None:
        (started_at, backend_s), now = self._step_started, (self._clock(), self._backend_s)
        seconds, backend_s, self._step_started = now[0] - started_at, now[1] - backend_s, now
        num_generated = sum(len(commit.tokens) for commit in commits) + num_plain
        num_prompt = max(0, sum(commit.num_computed for commit in commits) + num_plain - num_generated)
        self._meter.add(StepTiming(seconds, backend_s, num_prompt, num_generated, len(commits) + num_plain))
        self.scheduler.observe(plan, seconds, self._layerwise_s)
