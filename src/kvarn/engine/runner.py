"""The front of the one thread that owns an Engine: any thread may submit, cancel, ask, drain and close.

    callers ──ask──> inbox ──between steps──> Loop, on its thread ──step──> Engine
       └─────── handle <──events, result── ticket <──┘

Knows nothing of scheduling, models or text.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvarn.engine.engine import Engine
from kvarn.engine.engine_arbiter import EngineArbiter, process_turnstile
from kvarn.engine.handle import OnEvent, RequestHandle, Ticket
from kvarn.engine.loop import STOP_TIMEOUT_S, Loop
from kvarn.errors import BackendError, CapacityError, RequestError
from kvarn.request import Request
from kvarn.structured.constraints import Compiled
from kvarn.types import SamplingParams

T = TypeVar("T")
STEP_TIMEOUT_S = 120.0
DRAIN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Submission:
    """What a caller wants computed."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    starts_text: bool = False
    tenant: str = ""  # salts the prefix cache: tenants never share blocks
    visible_ids: frozenset[int] = frozenset()  # control tokens that count as text, such as the mark of a tool call
    constraint: Compiled | None = None  # params.constraint, ready for the model's vocabulary


class Runner:
    """Dropping the last reference stops the thread, as close() does; handles count as references."""

    def __init__(
        self,
        engine: Engine,
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
        release: Callable[[], None] | None = None,
        turnstile: EngineArbiter | None = None,
    ) -> None:
        """release is called once, when nothing uses the backend any more. turnstile: by default the process's."""
        self._loop = Loop(engine, step_timeout_s, release or _nothing, turnstile or process_turnstile())
        self._ageing_s = engine.config.ageing_s
        self._is_draining = False
        # A finaliser may run while its thread holds any lock, so it only asks.
        weakref.finalize(self, self._loop.ask_to_stop).atexit = False
        self._loop.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and no step is stuck: what a liveness probe wants to know."""
        return self._loop.is_alive and not self.is_stuck()

    @property
    def heartbeat(self) -> float:
        """time.monotonic() at the last sign of life; an idle thread gives none."""
        return self._loop.heartbeat

    @property
    def sign_of_life(self) -> tuple[float, int] | None:
        """Differs from the last one as long as work advances, also within a long native step; None while idle."""
        return self._loop.sign_of_life

    def is_stuck(self, step_timeout_s: float | None = None) -> bool:
        """Whether the step in flight has been running longer than step_timeout_s (default: the configuration's)."""
        return self._loop.busy_s > (self._loop.step_timeout_s if step_timeout_s is None else step_timeout_s)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        starts_text: bool = False,
        tenant: str = "",
        on_event: OnEvent | None = None,
    ) -> RequestHandle:
        """Queue a request, or raise why not. on_event is called on the engine's thread: be brief there."""
        (handle,) = self.submit_all([Submission(prompt_ids, params, starts_text, tenant)], Ticket(on_event))
        return handle

    def submit_all(self, submissions: Sequence[Submission], *tickets: Ticket) -> list[RequestHandle]:
        """Queue several requests at once; when one is refused, none is started."""
        try:
            self.send(submissions, tickets).result()
        except BaseException:  # refused, or Ctrl-C while waiting for the answer
            for ticket in tickets:
                ticket.cancel()
            raise
        return [RequestHandle(ticket, self, self._loop.thread) for ticket in tickets]

    def send(self, submissions: Sequence[Submission], tickets: Sequence[Ticket]) -> Future[None]:
        """Queue requests without waiting; the future tells whether they were accepted."""
        return self.ask(lambda engine: self._admit(engine, submissions, tickets))

    def ask(self, work: Callable[[Engine], T]) -> Future[T]:
        """Run work on the engine's thread between two steps; nothing that computes, see compute()."""
        return self._loop.ask(work)

    def compute(self, work: Callable[[Engine], T], num_tokens: int = 0, *, priority: int = 0) -> Future[T]:
        """Run work in the engine's turn, once num_tokens fit into the cache beside the running requests.

        The priority is that of the turn among the engines of the process, and orders the pieces of work that
        wait for this one: they age as requests do, and one is done between two steps.
        """
        due_at = time.monotonic() - priority * self._ageing_s

        def run(engine: Engine) -> T:
            self._loop.step_until(lambda engine: engine.kv.num_free >= engine.kv.blocks_for(num_tokens))
            with self._loop.turn(priority):
                return work(engine)

        return self._loop.ask(run, due_at)

    def exclusively(self, work: Callable[[Engine], T], num_tokens: int = 0) -> T:
        """Run work as compute() does, and wait for it."""
        return self.compute(work, num_tokens).result()

    def beat(self) -> None:
        """Called by a long piece of work between its steps: it is alive, and other engines may take their turn."""
        self._loop.breathe()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more and wait for what runs; whether all of it ended in time."""
        if threading.current_thread() is self._loop.thread:
            raise RequestError("draining inside on_token would wait for ever; do it on another thread")
        self._is_draining = True
        tickets = self.ask(lambda _: list(self._loop.tickets.values())).result()
        return not wait([ticket.done for ticket in tickets], timeout_s).not_done

    def close(self) -> None:
        """End what runs with an error, stop the thread and release the model; later calls raise."""
        if not self._loop.stop(STOP_TIMEOUT_S):
            raise BackendError("a step is still running; the model's memory is freed when it ends")

    def _admit(self, engine: Engine, submissions: Sequence[Submission], tickets: Sequence[Ticket]) -> None:
        if self._is_draining:
            raise CapacityError("the engine is shutting down; ask another one", retry_after_s=DRAIN_RETRY_S)
        try:
            for submission, ticket in zip(submissions, tickets, strict=True):
                for request in _submit_choices(engine, submission):
                    self._loop.tickets[request.id] = ticket
                    ticket.add(request)
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            self._loop.tell(engine.reap())
            raise


def _submit_choices(engine: Engine, one: Submission) -> Iterator[Request]:
    """Queue the n answers to one prompt; those after the first start on its computed prompt."""
    submit = partial(
        engine.submit,
        one.prompt_ids,
        one.params,
        starts_text=one.starts_text,
        tenant=one.tenant,
        visible_ids=one.visible_ids,
        constraint=one.constraint,
    )
    first = submit()
    yield first
    for choice in range(1, one.params.n):
        yield submit(request_id=f"{first.id}.{choice}", choice=choice, fork_of=first)


def _nothing() -> None:
    pass
