"""The life of the engine's thread: take what callers ask, step, tell, sleep; and the watchdog beside it.

Asking never waits for a lock, so that finalisers and signal handlers may do it at any time.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty
from typing import Any, TypeVar

from kvarn.engine.engine import Engine
from kvarn.engine.engine_arbiter import Demand, EngineArbiter
from kvarn.engine.handle import Ticket, settle
from kvarn.engine.inbox import Asked, Inbox, fresh
from kvarn.errors import BackendError, KvarnError, RequestError
from kvarn.types import TokenEvent

T = TypeVar("T")
log = logging.getLogger("kvarn.engine")

COMPACT_AFTER_S = 2.0  # idle this long: pages of free blocks go back to the system ...
FORGET_AFTER_S = 600.0  # ... and those of cached prefixes too
MAX_FAILED_STEPS = 3  # in a row, outside any request: then the engine is given up
STOP_TIMEOUT_S = 60.0  # a step in flight cannot be interrupted
CLOSED = "this LLM is closed; make a new one"
WATCH_EVERY_S = 10.0  # or a quarter of the step timeout, where that is shorter


class Loop:
    """Owns the engine, the inbox and the open tickets; private methods run on its thread."""

    def __init__(
        self, engine: Engine, step_timeout_s: float, release: Callable[[], None], turnstile: EngineArbiter
    ) -> None:
        self.step_timeout_s = step_timeout_s
        self.thread = threading.Thread(target=self._run, name="kvarn-engine", daemon=True)
        self.heartbeat = time.monotonic()  # the last sign of life
        self.tickets: dict[str, Ticket] = {}  # by request id
        self._engine = engine
        self._release = release
        self._turnstile = turnstile
        self._lane = turnstile.lane()
        self._inbox = Inbox()
        self._running: Asked[Any] | None = None
        self._is_busy = False
        self._is_stopping = False
        self._work_priority: int | None = None  # of the piece of work whose turn it is
        self._failure: KvarnError | None = None  # why nothing is accepted
        self._num_failed_steps = 0
        self._housekeeping: list[tuple[float, bool]] = []  # (when, whether cached prefixes go too), soonest first
        self._stopped = threading.Event()

    def start(self) -> None:
        # At exit the thread is waited for: one that comes back from native code into a dead interpreter takes the
        # process down.
        atexit.register(self.stop, STOP_TIMEOUT_S)
        self.thread.start()
        threading.Thread(target=self._watch, name="kvarn-watchdog", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive() and not self._stopped.is_set()

    @property
    def busy_s(self) -> float:
        """Time since the last sign of life while there is work; 0.0 while idle."""
        return time.monotonic() - self.heartbeat if self._is_busy else 0.0

    @property
    def sign_of_life(self) -> tuple[float, int] | None:
        """Differs from the last one as long as work advances, also within a long native step; None while idle."""
        return (self.heartbeat, self._engine.backend.progress) if self._is_busy else None

    def beat(self) -> None:
        self.heartbeat = time.monotonic()

    def ask(self, work: Callable[[Engine], T], due_at: float | None = None) -> Future[T]:
        """Run work between two steps; on the engine's own thread, where no step is in flight, at once.

        due_at: of work that computes; one such piece is done between two steps, the earliest first.
        """
        asked = Asked(work, Future(), due_at)
        if threading.current_thread() is self.thread:
            asked.run(self._engine)
            return asked.answer
        self._inbox.put(asked)
        # Looked at after the put: whoever sets a failure empties the inbox afterwards, so nobody is left waiting.
        failure = self._failure
        if failure is None and not self.is_alive:  # also in a forked child, which has no such thread
            failure = BackendError("the engine's thread is not running in this process; load the model here")
        if failure is not None:
            self._inbox.refuse_all(failure)
        return asked.answer

    def ask_to_stop(self) -> None:
        self._is_stopping = True
        self._inbox.put(None)

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False when its step did not come back in time. On the thread itself: after this step."""
        self.ask_to_stop()
        if threading.current_thread() is self.thread:
            return True
        self.thread.join(0.0 if self._failure is not None and self.busy_s > self.step_timeout_s else timeout_s)
        return not self.thread.is_alive()

    @contextmanager
    def turn(self, priority: int = 0) -> Iterator[None]:
        """This engine's turn among those of the process, for a piece of work of some priority that computes."""
        self._work_priority = priority
        self._enter()
        try:
            yield
        finally:
            self._work_priority = None
            self._lane.leave(wants_more=self._engine.has_work)

    def breathe(self) -> None:
        """Between two computations of one piece of work: say that it is alive, and let other engines step."""
        self.beat()
        if self._turnstile.is_contended:
            self._lane.leave(wants_more=True)
            self._enter()

    def step_until(self, is_enough: Callable[[Engine], bool]) -> None:
        """Step inside a piece of work, until is_enough or nothing is left to do."""
        while not is_enough(self._engine) and self._engine.has_work and not self._is_stopping:
            self._step()

    def tell(self, events: Sequence[TokenEvent]) -> None:
        """Pass events to their tickets."""
        for event in events:
            ticket = self.tickets.get(event.request_id)
            if ticket is None:
                continue
            if event.finish_reason is not None:
                del self.tickets[event.request_id]
            ticket.tell(event)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except BaseException as error:
            log.exception("the engine's thread ends")
            self._failure = BackendError(f"the engine gave up: {error}; load the model again")
        finally:
            self._end()

    def _turn(self) -> None:
        if not self._engine.has_work and not self._inbox.has_works:
            self._take(self._sleep())
        for _ in range(len(self._inbox)):  # not until empty: callers must not keep the engine from stepping
            with suppress(Empty):
                self._take(self._inbox.get(0.0))
        if (work := self._inbox.next_work()) is not None:
            self._do(work)
        if self._engine.has_work and not self._is_stopping:
            self._step()
        self._is_busy = False

    def _take(self, asked: Asked[Any] | None) -> None:
        if asked is None:
            return
        if asked.due_at is not None:
            self._inbox.put_aside(asked, asked.due_at)
        else:
            self._do(asked)

    def _do(self, asked: Asked[Any]) -> None:
        self._is_busy, self._running = True, asked
        self.beat()
        asked.run(self._engine)
        self._running = None
        self._recover()
        if not self._housekeeping:  # it may have used blocks; asking alone must not put off what is planned
            self._plan_housekeeping()

    def _step(self) -> None:
        self._is_busy = True
        self.beat()
        try:
            events = self._step_in_turn()
            self._num_failed_steps = 0
        except Exception as error:
            self._step_failed(error)
            events = []
        self.tell(events)
        self._recover()
        if not self._engine.has_work:
            self._plan_housekeeping()
        elif (wait_s := self._engine.wait_s) > 0:  # for company: more requests may share the first step
            with suppress(Empty):
                self._take(self._inbox.get(wait_s))

    def _step_in_turn(self) -> list[TokenEvent]:
        if not self._is_called():
            return []  # stopped while others stepped
        try:
            return self._engine.step()
        finally:
            self._lane.leave(wants_more=self._engine.has_work and self._engine.wait_s <= 0)

    def _enter(self) -> None:
        if not self._is_called():
            raise RequestError(CLOSED)

    def _is_called(self) -> bool:
        """Wait for the turn; False when the loop was told to stop meanwhile."""
        return self._lane.enter(self._demand, lambda: not self._is_stopping, self.beat)

    def _demand(self) -> Demand:
        demand, own = self._engine.demand, self._work_priority
        if own is None:
            return demand
        return Demand(demand.num_requests + 1, max(demand.priority, own) if demand.num_requests else own)

    def _step_failed(self, error: Exception) -> None:
        """An exception that no request caused: end them all, and go on unless it keeps happening."""
        log.exception("a step failed outside any request")
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise error
        failure = BackendError(f"the engine failed outside any request: {error or type(error).__name__}")
        failure.__cause__ = error
        for ticket in list(self.tickets.values()):
            ticket.fail(failure)

    def _sleep(self) -> Asked[Any] | None:
        """Wait for something to do; memory goes back to the system meanwhile."""
        while self._housekeeping:
            when, drops_cached = self._housekeeping[0]
            try:
                return self._inbox.get(max(0.0, when - time.monotonic()))
            except Empty:
                self._housekeeping.pop(0)
                self._compact(drops_cached)
        return self._inbox.get()

    def _plan_housekeeping(self) -> None:
        self._housekeeping = [(self.heartbeat + COMPACT_AFTER_S, False), (self.heartbeat + FORGET_AFTER_S, True)]

    def _compact(self, drops_cached: bool) -> None:
        try:
            self._engine.backend.return_kv(self._engine.kv.reclaim(drop_cached=drops_cached))
        except Exception:
            log.exception("idle memory was not returned")

    def _end(self) -> None:
        """Leave nobody waiting, then let go of the model."""
        atexit.unregister(self.stop)
        self._lane.forfeit()
        if self._failure is None:
            self._failure = RequestError(CLOSED)
        for ticket in list(self.tickets.values()):
            ticket.fail(fresh(self._failure))
        self._stopped.set()
        self._inbox.refuse_all(self._failure)
        try:
            self._engine.reap()
            self._release()
        except Exception:
            log.exception("the model was not released cleanly")

    def _recover(self) -> None:
        """A stuck step that came back: the loop serves again."""
        self.beat()  # first, so that the watchdog sees it has been too late
        if self._failure is not None:
            log.warning("a step that was stuck has come back after all")
            self._failure = None

    def _watch(self) -> None:
        period = min(WATCH_EVERY_S, self.step_timeout_s / 4)
        looked_at = time.monotonic()
        while not self._stopped.wait(period):
            was_asleep = time.monotonic() - looked_at > 2 * period  # the whole process was stopped: look again later
            looked_at = time.monotonic()
            if self.busy_s > self.step_timeout_s and self._failure is None and not was_asleep:
                self._report_stuck()

    def _report_stuck(self) -> None:
        """Runs on the watchdog's thread: nobody shall wait for a step that may never end."""
        since = self.heartbeat
        failure = BackendError(
            f"a step has been running for {self.busy_s:.1f} s, longer than step_timeout_s={self.step_timeout_s:g}; "
            "the engine serves again when it ends"
        )
        self._failure = failure
        if self.heartbeat != since or not self._is_busy:  # it has just ended, and may have cleared before we set
            self._failure = None
            return
        log.error("%s", failure)
        self._lane.forfeit()  # the other engines of the process go on
        if self._running is not None:
            settle(self._running.answer, error=fresh(failure))
        for ticket in list(self.tickets.values()):
            ticket.fail(fresh(failure))
        self._inbox.refuse_all(failure)
