"""The engine requests of one HTTP request: from their admission to the last token.

    Generations.begin: prepare (worker thread) ─> check lengths ─> reserve answers and tokens ─> submit ─> Generation
    Generation: events as they come, or finish(); close() settles everything exactly once, however it ends

Knows the engine's events and the caller's limits; knows no body, no schema and no status code.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvarn.engine.handle import Ticket
from kvarn.errors import CapacityError
from kvarn.server.api.schema import engine_parameters
from kvarn.server.chat.generation_plan import GenerationPlan, Prepare, RequestOptions, make_plan
from kvarn.server.chat.generation_progress import Phase, TokenGaps, num_charged, phase_of, prompt_progress, usage_of
from kvarn.server.failures import UnknownRequest
from kvarn.server.http.disconnect import client_gone, while_awaited
from kvarn.types import Completion, FinishReason, TokenEvent, Usage

if TYPE_CHECKING:
    from kvarn.async_llm import Mailbox
    from kvarn.observe.metrics import Metrics
    from kvarn.request import Request
    from kvarn.server.access.keys import Principal
    from kvarn.server.chat.output.output_plan import OutputPlan
    from kvarn.server.chat.output.output_stream import OutputStream
    from kvarn.server.models.model_pool import ServedModel
    from kvarn.server.request_context import RequestContext

MAX_UNREAD_CANVASES = 256  # each as long as its answer
ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # of ids in answers; the request's id follows


class AnswerEvent(NamedTuple):
    """One step of one answer; prompt_index says which of the request's prompts it answers."""

    prompt_index: int
    token: TokenEvent


class Generations:
    """Begins generations and keeps those that run, by key and request id. For one thread: the event loop's."""

    def __init__(self, metrics: Metrics, queue_limit: int) -> None:
        self.metrics = metrics
        self._queue_limit = queue_limit
        self._running: dict[tuple[str, str], Generation] = {}  # by key and id

    def __len__(self) -> int:
        return len(self._running)

    async def begin(
        self, request: RequestContext, model: ServedModel, prepare: Sequence[Prepare], options: RequestOptions
    ) -> Generation:
        """Prepare each prompt, check, reserve and submit; refusals are raised here, before any byte of a response."""
        check = partial(make_plan, request, model.llm.llm, prepare, options, self._queue_limit)
        plan = await while_awaited(request, asyncio.to_thread(check))
        request.reserve(plan.num_tokens, num_answers=plan.num_answers)
        generation = Generation(request, model, plan, self)
        request.held.callback(generation.close)
        self._running[generation.key] = generation  # of two with the same id the later one is found
        try:
            await generation.submit()
        except CapacityError:
            self.metrics.request_refused(request.principal.tier.name, "queue")
            raise
        return generation

    def find(self, principal: Principal, request_id: str) -> Generation:
        """The running generation with this id, if it is the caller's own."""
        for prefix in ID_PREFIXES:
            request_id = request_id.removeprefix(prefix)
        generation = self._running.get((principal.key_id, request_id))
        if generation is None:
            raise UnknownRequest("no request with this id is running; it may have ended")
        return generation

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
        self._ready: deque[AnswerEvent] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._is_quiet = False  # events are not read, only the results count
        self._error: BaseException | None = None
        self._is_accepted = False  # by the engine
        self._is_closed = False
        self._gaps = TokenGaps(generations.metrics.token_gaps(model.id))
        mailbox = model.llm.mailbox()
        self._tickets: list[Ticket] = []
        for index in range(len(plan.submissions)):
            ticket = Ticket(partial(_post_event, mailbox, self._take, index), keeps_events=False)
            ticket.done.add_done_callback(partial(_post_end, mailbox, self._end))
            self._tickets.append(ticket)
        self._num_open = len(self._tickets)
        self._watch = asyncio.create_task(self._watch_client())

    @property
    def key(self) -> tuple[str, str]:
        """Under which it is found: the key that sent the request, and the request's id."""
        return self.request.principal.key_id, self.request.id

    async def submit(self) -> None:
        """Hand the requests to the engine; returns when all of them are accepted."""
        try:
            with engine_parameters():
                await self.model.llm.send(self.plan.submissions, self._tickets)
            self._is_accepted = True
        except BaseException:
            self.close()
            raise

    @property
    def phase(self) -> Phase:
        return "finished" if self._num_open == 0 or self._is_closed else phase_of(self._requests)

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
        return all(ticket.is_cancelled for ticket in self._tickets)

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Prompt tokens computed, and all of them."""
        return prompt_progress(self._requests)

    def progress(self) -> str:
        """How far it is, as a stream tells it while there is no text."""
        done, total = self.prompt_progress
        return f"{self.phase}, {done} of {total} prompt tokens"

    def reader(self, plan: OutputPlan, choice: int = 0) -> OutputStream:
        """What takes one of the answers to the only prompt apart."""
        (submission,) = self.plan.submissions
        return plan.reader(self.model.llm.llm.tokenizer, submission.prompt_ids, f"{self.request.id}.{choice}")

    def usage(self) -> Usage:
        """Tokens so far: each prompt once, the answers of all choices."""
        return usage_of(self._requests)

    async def batches(self) -> AsyncIterator[list[AnswerEvent]]:
        """Events as they come, all that are ready at once together."""
        while await self._has_events():
            batch = list(self._ready)
            self._ready.clear()
            yield batch

    async def finish(self) -> list[Completion]:
        """Wait for all results, one for each prompt; ClientGone when the client disconnects."""
        self._is_quiet = True
        self._ready.clear()
        try:
            while await self._has_events():
                self._ready.clear()
            return [ticket.done.result() for ticket in self._tickets]
        except BaseException:
            self.close()  # settles what was used before a refusal reports what is left of the limits
            raise

    def cancel(self) -> None:
        """Ask for the end: what was generated so far is the result."""
        for ticket in self._tickets:
            ticket.cancel()

    def fail(self, error: BaseException) -> None:
        """End with an error, once the events that are ready have been read."""
        if self._error is None and self._num_open:
            self._error = error
        self.cancel()
        self._wake()

    def close(self) -> None:
        """Cancel what still runs, and settle with limits and metrics; only the first time."""
        if self._is_closed:
            return
        phase, self._is_closed = self.phase, True
        self.cancel()
        self._watch.cancel()
        self.request.reservation.settle(num_charged(self._requests) if self._is_accepted else 0)
        self._generations.remove(self)
        if self._is_accepted:
            self._count(phase)
        # Both refer to this object: a cycle would keep every request in memory until the garbage collector runs.
        del self._watch
        self._tickets = []

    @property
    def _requests(self) -> list[Request]:
        return _requests_of(self._tickets)

    def _count(self, phase: Phase) -> None:
        """Tell metrics and the log how it ended."""
        metrics, model, usage = self._generations.metrics, self.model.id, self.usage()
        log_fields, latency_s = self.request.log_fields, time.monotonic() - self.request.received_at
        log_fields.update(model=model, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
        log_fields["cached_tokens"] = usage.cached_tokens
        left = [ticket for ticket in self._tickets if not ticket.is_settled]  # read once: the engine goes on meanwhile
        for ticket, submission in zip(self._tickets, self.plan.submissions, strict=True):
            if ticket in left:
                continue
            error = ticket.done.exception()
            if error is None:
                completion = ticket.done.result()
                metrics.request_finished(model, completion, submission.params, latency_s)
                log_fields["finish_reason"] = str(completion.finish_reason)
            else:
                metrics.request_failed(model, error)
        abandoned = _requests_of(left)
        if phase != "finished" and abandoned:  # else it was refused, or has just ended
            metrics.request_abandoned(model, usage_of(abandoned), phase)

    async def _has_events(self) -> bool:
        """Wait until an event is ready, or all are over; raise the error once the events before it were read."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                return False
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return True

    def _take(self, event: AnswerEvent) -> None:
        self._gaps.observe(event.prompt_index, event.token)
        if event.token.finish_reason is FinishReason.DEADLINE and self._error is None:
            self._error = self.request.deadline.error()
        if not self._is_quiet:
            if event.token.canvas is not None and len(self._ready) >= MAX_UNREAD_CANVASES:
                return  # a reader that has fallen behind misses steps, and no text
            self._ready.append(event)
            self._wake()

    def _end(self, error: BaseException | None) -> None:
        """One ticket is settled."""
        self._num_open -= 1
        if error is not None:
            self._num_open = max(self._num_open, 0)
            if self._error is None:
                self._error = error
            self.cancel()
        if error is not None or self._num_open == 0:
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _watch_client(self) -> None:
        self.fail(await client_gone(self.request.receive))


def _requests_of(tickets: Sequence[Ticket]) -> list[Request]:
    return [request for ticket in tickets for request in ticket.requests]


def _post_event(mailbox: Mailbox, take: Callable[[AnswerEvent], None], prompt_index: int, token: TokenEvent) -> None:
    """Called on the engine's thread."""
    mailbox.post(take, AnswerEvent(prompt_index, token))


def _post_end(mailbox: Mailbox, end: Callable[[BaseException | None], None], done: Future[Completion]) -> None:
    with suppress(RuntimeError):  # the event loop is closed: nothing waits for the result
        mailbox.post(end, done.exception())
