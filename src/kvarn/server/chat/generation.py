"""The engine requests of one HTTP request: from their admission to the last token.

    Generations.begin: prepare (worker thread) ─> check lengths ─> reserve answers and tokens ─> compile (its turn)
                       ─> submit ─> Generation
    Generation: events as they come, or finish(); close() settles everything exactly once, however it ends

Knows the engine's events and the caller's limits; knows no body, no schema and no status code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvarn.errors import CapacityError
from kvarn.server.api.schema import ConstraintRefused
from kvarn.server.chat.generation_plan import GenerationPlan, Prepare, RequestOptions, make_plan
from kvarn.server.chat.generation_progress import (
    GenerationPhase,
    TokenGaps,
    left_s,
    num_charged,
    phase_of,
    prompt_progress,
    usage_of,
)
from kvarn.server.chat.pending_constraint import compiled
from kvarn.server.failures import UnknownRequest
from kvarn.server.http.disconnect import client_gone
from kvarn.server.process.worker_threads import work_for
from kvarn.types import Completion, FinishReason, TokenEvent, Usage

if TYPE_CHECKING:
    from kvarn.engine.delivery.async_answers import IndexedEvent
    from kvarn.engine.handle import OutputCollector
    from kvarn.observe.metrics import Metrics
    from kvarn.request import Request
    from kvarn.server.access.keys import Principal
    from kvarn.server.chat.output.harmony_stream import AnswerReader
    from kvarn.server.chat.output.output_plan import OutputPlan
    from kvarn.server.models.served_model import ServedModel
    from kvarn.server.process.worker_threads import WorkerThreads
    from kvarn.server.request_context import RequestContext

MAX_UNREAD_CANVASES = 256  # each as long as its answer
REFUSED_CONSTRAINT_TOKENS = 1000  # charged for one that could not be compiled: seconds of a core
ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # of ids in answers; the request's id follows


class Generations:
    """Begins generations and keeps those that run, by key and request id. For one thread: the event loop's."""

    def __init__(self, metrics: Metrics, queue_limit: int, compiling: WorkerThreads) -> None:
        """compiling: the threads that compile constraints, of which one key holds but one."""
        self.metrics = metrics
        self._queue_limit = queue_limit
        self._compiling = compiling
        self._running: dict[tuple[str, str], Generation] = {}  # by key and id

    def __len__(self) -> int:
        return len(self._running)

    async def begin(
        self, request: RequestContext, model: ServedModel, prepare: Sequence[Prepare], options: RequestOptions
    ) -> Generation:
        """Prepare each prompt, check, reserve and submit; refusals are raised here, before any byte of a response."""
        check = partial(make_plan, request, model, prepare, options, self._queue_limit)
        plan = check() if options.is_short else await request.in_thread(check)
        if plan.warning is not None:
            request.warn(plan.warning)
        await request.reserve(plan.num_tokens, num_answers=plan.num_answers, open_ended=plan.open_ended)
        if plan.is_pending:
            plan = await self._compiled(request, model, plan)
        generation = Generation(request, model, plan, self)
        request.held.callback(generation.close)
        self._running[generation.key] = generation  # of two with the same id the later one is found
        try:
            await generation.submit()
        except CapacityError:
            self.metrics.request_refused(request.principal.tier.name, "queue")
            raise
        return generation

    async def _compiled(self, request: RequestContext, model: ServedModel, plan: GenerationPlan) -> GenerationPlan:
        """The plan with its constraints compiled. One that cannot be has cost as much as an answer."""
        constraints = model.llm.llm.submissions.constraints
        work = partial(compiled, plan.submissions, partial(constraints.compile, ended=request.ended))
        try:
            ready = await work_for(request, self._compiling, work)
        except ConstraintRefused:
            request.reservation.spend(REFUSED_CONSTRAINT_TOKENS)
            raise
        return replace(plan, submissions=ready)

    def find(self, principal: Principal, request_id: str) -> Generation:
        """The running generation with this id, if it is the caller's own."""
        for prefix in ID_PREFIXES:
            request_id = request_id.removeprefix(prefix)
        generation = self._running.get((principal.fingerprint, request_id))
        if generation is None:
            raise UnknownRequest("no request with this id is running; it may have ended")
        return generation

    def of(self, principal: Principal) -> list[Generation]:
        """Those of one key that run, oldest first."""
        return [one for (fingerprint, _), one in self._running.items() if fingerprint == principal.fingerprint]

    def left_s(self, model_id: str) -> float | None:
        """How long the answers of a model will still take at most, going by what they did so far; None: not known."""
        running = [one for one in self._running.values() if one.model.base_id == model_id]
        known = [one.left_s for one in running]
        return None if not known or None in known else max(filter(None, known), default=0.0)

    def fail_all(self, error: Exception) -> None:
        """End everything that runs with an error, which streams send as their last event."""
        for generation in list(self._running.values()):
            generation.fail(error)

    def remove(self, generation: Generation) -> None:
        if self._running.get(generation.key) is generation:
            del self._running[generation.key]


class Generation:
    """The engine requests of one HTTP request. For the event loop; cancels itself when the client disconnects."""

    def __init__(
        self, request: RequestContext, model: ServedModel, plan: GenerationPlan, generations: Generations
    ) -> None:
        self.request = request
        self.model = model
        self.plan = plan
        self._generations = generations
        self._is_quiet = False  # events are not read, only the results count
        self._is_accepted = False  # by the engine
        self._is_closed = False
        self._num_speaking = plan.num_answers  # whose last event has not come
        self._gaps = TokenGaps(generations.metrics.token_gaps(model.base_id))
        client, number = model.llm.llm.client, len(plan.submissions)
        self._answers = client.stream_async(number, self._on_arrival, polls_tokens=True)
        self._watch = asyncio.create_task(self._watch_client())

    @property
    def key(self) -> tuple[str, str]:
        """Under which it is found: the key that sent the request, and the request's id."""
        return self.request.principal.fingerprint, self.request.id

    async def submit(self) -> None:
        """Hand the requests to the engine; returns when all of them are accepted."""
        try:
            await self._answers.submit(self.plan.submissions)
            self._is_accepted = True
        except BaseException:
            self.close()
            raise

    @property
    def phase(self) -> GenerationPhase:
        return "finished" if self._answers.num_open == 0 or self._is_closed else phase_of(self._requests)

    def is_over(self) -> bool:
        """Whether the last event of every answer has come, read or not."""
        return self._num_speaking == 0

    @property
    def engine_ids(self) -> list[str]:
        """What the engine calls its requests."""
        return [request.id for request in self._requests]

    @property
    def priority(self) -> int:
        """As asked for, within what the tier allows."""
        return self.plan.submissions[0].params.priority

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.plan.submissions[0].params.n

    @property
    def is_cancelled(self) -> bool:
        """Whether cancel() was called."""
        return all(collector.is_cancelled for collector in self._answers.collectors)

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Prompt tokens computed, and all of them."""
        return prompt_progress(self._requests)

    @property
    def left_s(self) -> float | None:
        """Seconds until it has ended at the latest; None before its first tokens."""
        return left_s(self._requests)

    def progress(self) -> str:
        """How far it is, as a stream tells it while there is no text."""
        done, total = self.prompt_progress
        return f"{self.phase}, {done} of {total} prompt tokens"

    def reader(self, plan: OutputPlan, choice: int = 0) -> AnswerReader:
        """What takes one of the answers to the only prompt apart."""
        (submission,) = self.plan.submissions
        return plan.reader(self.model.llm.llm.tokenizer, submission.prompt_ids, f"{self.request.id}.{choice}")

    def usage(self) -> Usage:
        """Tokens so far: each prompt once, the answers of all choices."""
        return usage_of(self._requests)

    def batches(self) -> AsyncIterator[list[IndexedEvent]]:
        """Events as they come, each with the index of its prompt, all that are ready at once together."""
        return self._answers.batches()

    async def finish(self) -> list[Completion]:
        """Wait for all results, one for each prompt; ClientGone when the client disconnects."""
        self._is_quiet = True
        try:
            results = await self._answers.results()
            self.request.use(num_charged(self._requests))
            return results
        except BaseException:
            self.close()  # settles what was used before a refusal reports what is left of the limits
            raise

    def cancel(self) -> None:
        """Ask for the end: what was generated so far is the result."""
        self._answers.cancel()

    def fail(self, error: BaseException) -> None:
        """End with an error, once the events that are ready have been read."""
        self._answers.fail(error)

    def close(self) -> None:
        """Cancel what still runs, and settle with limits and metrics; only the first time."""
        if self._is_closed:
            return
        phase, self._is_closed = self.phase, True
        self.cancel()
        self._watch.cancel()
        self.request.use(num_charged(self._requests) if self._is_accepted else 0)
        self._generations.remove(self)
        if self._is_accepted:
            self._count(phase)
        # Both refer to this object: a cycle would keep every request in memory until the garbage collector runs.
        del self._watch
        self._answers.release()

    @property
    def _requests(self) -> list[Request]:
        return _requests_of(self._answers.collectors)

    def _count(self, phase: GenerationPhase) -> None:
        """Tell metrics and the log how it ended."""
        metrics, model, usage = self._generations.metrics, self.model.base_id, self.usage()
        log_fields, latency_s = self.request.log_fields, time.monotonic() - self.request.received_at
        log_fields.update(
            model=self.model.id, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )
        log_fields["cached_tokens"] = usage.cached_tokens
        collectors = self._answers.collectors
        left = [collector for collector in collectors if not collector.is_settled]  # read once: the engine goes on
        for collector, submission in zip(collectors, self.plan.submissions, strict=True):
            if collector in left:
                continue
            error = collector.done.exception()
            if error is None:
                completion = collector.done.result()
                metrics.request_finished(model, completion, submission.params, latency_s)
                log_fields["finish_reason"] = str(completion.finish_reason)
            else:
                metrics.request_failed(model, error)
        abandoned = _requests_of(left)
        if phase != "finished" and abandoned:  # else it was refused, or has just ended
            metrics.request_abandoned(model, usage_of(abandoned), phase)

    def _on_arrival(self, prompt_index: int, event: TokenEvent) -> bool:
        """Called in the event loop; whether the event is kept for the reader."""
        self._gaps.observe(prompt_index, event)
        self._num_speaking -= event.finish_reason is not None
        if event.finish_reason is FinishReason.DEADLINE and self._answers.error is None:
            self._answers.error = self.request.deadline.error()
        # A reader that has fallen behind misses denoising steps, and no text.
        is_missed = event.canvas is not None and self._answers.num_unread >= MAX_UNREAD_CANVASES
        return not (self._is_quiet or is_missed)

    async def _watch_client(self) -> None:
        self.fail(await client_gone(self.request.receive))


def _requests_of(collectors: Sequence[OutputCollector]) -> list[Request]:
    return [request for collector in collectors for request in collector.requests]
