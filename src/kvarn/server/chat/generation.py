"""The heart of the server: one call's requests on their way through the engine, from refusal to the last token.

    begin: prepare (worker thread) ─> check lengths ─> reserve answers and tokens ─> submit ─> Generation
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
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvarn.engine.handle import Ticket
from kvarn.errors import CapacityError, DeadlineExceeded
from kvarn.server.chat.generation_plan import GenerationPlan, Prepare, RequestOptions, make_plan
from kvarn.server.failures import ClientGone
from kvarn.server.http.disconnect import while_awaited
from kvarn.types import Completion, FinishReason, TokenEvent, Usage

if TYPE_CHECKING:
    from kvarn.async_llm import Mailbox
    from kvarn.request import Request
    from kvarn.server.call import Call
    from kvarn.server.models.model_pool import ServedModel

MAX_UNREAD_CANVASES = 256  # each as long as its answer

Phase = Literal["queued", "prefill", "decode", "finished"]


class AnswerEvent(NamedTuple):
    """One step of one answer; prompt_index says which of the call's prompts it answers."""

    prompt_index: int
    token: TokenEvent


async def begin(call: Call, served: ServedModel, prepare: Prepare, wishes: RequestOptions | None = None) -> Generation:
    """Prepare, check, reserve and submit; whatever is refused is raised here, before any byte of a response."""
    check = partial(make_plan, call, served.llm.llm, prepare, wishes or RequestOptions())
    plan = await while_awaited(call, asyncio.to_thread(check))
    call.reserve(plan.num_tokens, num_answers=plan.num_answers)
    generation = call.generation = Generation(call, served, plan)
    try:
        await generation.submit()
    except CapacityError:
        call.state.metrics.request_refused(call.principal.tier.name, "queue")
        raise
    return generation


class Generation:
    """The running requests of one call. Lives in the event loop; cancels itself when the client goes away."""

    def __init__(self, call: Call, served: ServedModel, plan: GenerationPlan) -> None:
        self.call = call
        self.served = served
        self.plan = plan
        self._ready: deque[AnswerEvent] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._is_quiet = False  # nobody reads events, only the results count
        self._error: BaseException | None = None
        self._is_accepted = False  # by the engine
        self._is_closed = False
        self._gaps = call.state.metrics.token_gaps(served.id)
        self._told_at: dict[tuple[int, int], float] = {}  # by prompt and choice
        mailbox = served.llm.mailbox()
        self._tickets: list[Ticket] = []
        for index in range(len(plan.submissions)):
            ticket = Ticket(partial(_post_event, mailbox, self._take, index), keeps_events=False)
            ticket.done.add_done_callback(partial(_post_end, mailbox, self._end))
            self._tickets.append(ticket)
        self._num_open = len(self._tickets)
        self._watch = asyncio.create_task(self._watch_client())
        call.state.requests.add(self)

    async def submit(self) -> None:
        """Hand the requests to the engine; returns when all of them are accepted."""
        try:
            await self.served.llm.send(self.plan.submissions, self._tickets)
            self._is_accepted = True
        except BaseException:
            self.close()
            raise

    @property
    def phase(self) -> Phase:
        """Of the request that got furthest."""
        requests = self._requests
        if self._num_open == 0 or self._is_closed:
            return "finished"
        if any(request.num_output for request in requests):
            return "decode"
        return "prefill" if any(request.started_at is not None for request in requests) else "queued"

    @property
    def priority(self) -> int:
        """What the tier made of the wish."""
        return self.plan.submissions[0].params.priority

    @property
    def is_cancelled(self) -> bool:
        """Whether the end was asked for."""
        return all(ticket.is_cancelled for ticket in self._tickets)

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Prompt tokens computed, and all of them."""
        firsts = [ticket.requests[0] for ticket in self._tickets if ticket.requests]
        done = sum(min(request.num_computed, request.num_prompt) for request in firsts)
        return done, sum(request.num_prompt for request in firsts)

    def usage(self) -> Usage:
        """Tokens so far: each prompt once, the answers of all choices."""
        return _usage(self._tickets)

    def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        return self

    async def __anext__(self) -> AnswerEvent:
        await self._arrived()
        return self._ready.popleft()

    async def batches(self) -> AsyncIterator[list[AnswerEvent]]:
        """Events as they come, all that are ready at once together."""
        while True:
            try:
                await self._arrived()
            except StopAsyncIteration:
                return
            batch = list(self._ready)
            self._ready.clear()
            yield batch

    async def finish(self) -> list[Completion]:
        """Wait for all results, one for each prompt; ClientGone when nobody waits for them any more."""
        self._is_quiet = True
        self._ready.clear()
        async for _ in self:
            pass
        return [ticket.done.result() for ticket in self._tickets]

    def cancel(self) -> None:
        """Ask for the end: what was said so far is the result."""
        for ticket in self._tickets:
            ticket.cancel()

    def fail(self, error: BaseException) -> None:
        """End with an error, once the events that are ready have been read."""
        if self._error is None and self._num_open:
            self._error = error
        self.cancel()
        self._wake()

    def close(self) -> None:
        """Cancel what still runs and settle with limits, metrics and the book of requests; only the first time."""
        if self._is_closed:
            return
        phase, self._is_closed = self.phase, True
        self.cancel()
        self._watch.cancel()
        self.call.reservation.settle(self._num_used() if self._is_accepted else 0)
        self.call.state.requests.remove(self)
        if self._is_accepted:
            self._count(phase)
        # Both hold on to this object: a ring would keep every request in memory until the collector comes by.
        del self._watch
        self._tickets = []

    @property
    def _requests(self) -> list[Request]:
        return [request for ticket in self._tickets for request in ticket.requests]

    def _num_used(self) -> int:
        """Tokens to pay for: the prompts that were begun, and every answer."""
        started = [request for request in self._requests if request.started_at is not None]
        return sum(request.num_output + (request.num_prompt if request.choice == 0 else 0) for request in started)

    def _count(self, phase: Phase) -> None:
        """Tell metrics and the log how it ended."""
        metrics, model, usage = self.call.state.metrics, self.served.id, self.usage()
        facts = {"model": model, "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        self.call.http.scope.setdefault("kvarn.log", {}).update(facts, cached_tokens=usage.cached_tokens)
        latency_s = time.monotonic() - self.call.received_at
        left = [ticket for ticket in self._tickets if not ticket.is_settled]  # asked once: the engine goes on meanwhile
        for ticket, submission in zip(self._tickets, self.plan.submissions, strict=True):
            if ticket in left:
                continue
            error = ticket.done.exception()
            if error is None:
                completion = ticket.done.result()
                metrics.request_finished(model, completion, submission.params, latency_s)
                self.call.http.scope["kvarn.log"]["finish_reason"] = str(completion.finish_reason)
            else:
                metrics.request_failed(model, error)
        if phase != "finished" and any(ticket.requests for ticket in left):  # else it was refused, or has just ended
            metrics.request_abandoned(model, _usage(left), phase)

    async def _arrived(self) -> None:
        """Wait until an event is ready; raise the error, or StopAsyncIteration when all is over."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def _take(self, event: AnswerEvent) -> None:
        self._measure_gap(event)
        if event.token.finish_reason is FinishReason.DEADLINE and self._error is None:
            timeout_s = self.call.state.config.request_timeout_s
            self._error = DeadlineExceeded(f"the request did not end within {timeout_s:g} s; ask for less, or later")
        if not self._is_quiet:
            if event.token.canvas is not None and len(self._ready) >= MAX_UNREAD_CANVASES:
                return  # a reader that has fallen behind misses steps, and no text
            self._ready.append(event)
            self._wake()

    def _measure_gap(self, event: AnswerEvent) -> None:
        """Seconds between two tokens of one answer."""
        now, answer = time.monotonic(), (event.prompt_index, event.token.choice)
        before = self._told_at.get(answer)
        if before is not None and event.token.token_id is not None:
            self._gaps.observe(now - before)
        self._told_at[answer] = now

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
        """The body has been read: all that may still come is the news that the client went away."""
        while (await self.call.http.receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGone("the client closed the connection"))


def _post_event(mailbox: Mailbox, take: Callable[[AnswerEvent], None], prompt_index: int, token: TokenEvent) -> None:
    """Called on the engine's thread."""
    mailbox.post(take, AnswerEvent(prompt_index, token))


def _usage(tickets: Sequence[Ticket]) -> Usage:
    firsts = [ticket.requests[0] for ticket in tickets if ticket.requests]
    return Usage(
        prompt_tokens=sum(request.num_prompt for request in firsts),
        completion_tokens=sum(request.num_output for ticket in tickets for request in ticket.requests),
        cached_tokens=sum(request.num_cached or 0 for request in firsts),
    )


def _post_end(mailbox: Mailbox, end: Callable[[BaseException | None], None], done: Future[Completion]) -> None:
    with suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
        mailbox.post(end, done.exception())
