"""The one thread that owns an Engine: runs callers' functions between steps, steps, delivers events, sleeps.

Asking never waits for a lock, so that finalisers and signal handlers may do it at any time.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from queue import Empty
from typing import Any, TypeVar

from kvarn.engine.engine import Engine
from kvarn.engine.engine_arbiter import CLOSED, EngineArbiter, EngineTurn
from kvarn.engine.handle import OutputCollector, settle
from kvarn.engine.idle_memory import IdleMemory
from kvarn.engine.inbox import EngineCall, Inbox, fresh, refuse_while_draining
from kvarn.engine.step_watchdog import StepWatchdog, stuck_error
from kvarn.engine.submission import Submission
from kvarn.errors import BackendError, DeviceLost, KvarnError, RequestError
from kvarn.types import TokenEvent

T = TypeVar("T")
log = logging.getLogger("kvarn.engine")

MAX_FAILED_STEPS = 3  # in a row, outside any request: then the engine is given up
STOP_TIMEOUT_S = 60.0  # a step in flight cannot be interrupted
GAVE_UP = "the engine gave up: {}; load the model again"
NOT_HERE = "the engine's thread is not running in this process; load the model here"


class EngineThread:
    """Owns the engine, the inbox and the collectors of live requests; private methods run on its thread."""

    def __init__(
        self, engine: Engine, step_timeout_s: float, release: Callable[[], None], arbiter: EngineArbiter
    ) -> None:
        """release is called once, when nothing uses the backend any more."""
        self.step_timeout_s = step_timeout_s
        self.thread = threading.Thread(target=self._run, name="kvarn-engine", daemon=True)
        self.heartbeat = time.monotonic()  # the last sign of life
        self.collectors: dict[str, OutputCollector] = {}  # by request id
        self.is_draining = self.is_stopping = self._is_busy = False
        self.on_step: tuple[Callable[[], None], ...] = ()  # called after each
        self._engine = engine
        self._release = release
        self.turn = EngineTurn(arbiter, engine, weakref.proxy(self))  # no cycle: a dropped model is freed at once
        self._inbox = Inbox()
        self._current_call: EngineCall[Any] | None = None
        self._failure: KvarnError | None = None  # why nothing is accepted
        self._num_failed_steps = 0
        self._idle_memory = IdleMemory(engine)
        self._stopped = threading.Event()

    def start(self) -> None:
        # At exit the thread is waited for: one that comes back from native code into a dead interpreter takes the
        # process down.
        atexit.register(self.stop, STOP_TIMEOUT_S)
        self.thread.start()
        StepWatchdog(self, self._stopped).start()

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive() and not self._stopped.is_set() and self._engine.backend.lost is None

    @property
    def num_waiting(self) -> int:
        return self._engine.scheduler.num_waiting

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

    def submit(self, submissions: Sequence[Submission], collectors: Sequence[OutputCollector]) -> Future[None]:
        """Queue submissions all together; the future tells whether they were accepted."""
        return self.call(lambda engine: self._submit(engine, submissions, collectors))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function between two steps; on the engine's own thread, where no step is in flight, at once."""
        return self._put(EngineCall(function, Future()))

    def compute(self, function: Callable[[Engine], T], num_tokens: int, priority: int) -> Future[T]:
        """Run a function that computes, in this engine's turn; see EngineClient.compute."""

        def run(engine: Engine) -> T:
            while not engine.kv.has_room_for(num_tokens) and engine.has_work and not self.is_stopping:
                self._step()
            with self.turn.held_for(priority):
                return function(engine)

        return self._put(EngineCall(run, Future(), time.monotonic() - priority * self._engine.config.ageing_s))

    def begin_drain(self) -> Future[list[OutputCollector]]:
        """Accept nothing more; what still runs."""
        self.is_draining = True
        return self.call(lambda _: list(self.collectors.values()))

    def ask_to_stop(self) -> None:
        self.is_stopping = True
        self._inbox.put(None)

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False when its step did not come back in time. On the thread itself: after this step."""
        self.ask_to_stop()
        if threading.current_thread() is self.thread:
            return True
        self.thread.join(0.0 if self._failure is not None and self.busy_s > self.step_timeout_s else timeout_s)
        return not self.thread.is_alive()

    def report_stuck(self) -> None:
        """Called on the watchdog's thread: no caller shall wait for a step that may never end."""
        if self._failure is not None:
            return
        since = self.heartbeat
        failure = stuck_error(self.busy_s, self.step_timeout_s)
        self._failure = failure
        if self.heartbeat != since or not self._is_busy:  # it has just ended, and may have cleared before we set
            self._failure = None
            return
        log.error("%s", failure)
        self.turn.forfeit()  # the other engines of the process go on
        if self._current_call is not None:
            settle(self._current_call.result, error=fresh(failure))
        self._fail_all(failure)
        self._inbox.refuse_all(failure)

    def _put(self, call: EngineCall[T]) -> Future[T]:
        if threading.current_thread() is self.thread:
            self._run_call(call)
            return call.result
        self._inbox.put(call)
        # Read after the put: the thread that sets a failure empties the inbox afterwards, so no call is left waiting.
        failure = self._failure
        if failure is None and not self.is_alive:  # also in a forked child, which has no such thread
            lost = self._engine.backend.lost
            failure = BackendError(NOT_HERE if lost is None else GAVE_UP.format(lost))
        if failure is not None:
            self._inbox.refuse_all(failure)
        return call.result

    def _submit(self, engine: Engine, submissions: Sequence[Submission], collectors: Sequence[OutputCollector]) -> None:
        """Queue all submissions; when one is refused, none is started."""
        refuse_while_draining(self.is_draining)
        try:
            for submission, collector in zip(submissions, collectors, strict=True):
                is_streamed = submission.is_streamed and collector.reads_tokens
                is_polled = collector.polls_tokens and submission.wants_text_alone
                requests = engine.submit(replace(submission, is_streamed=is_streamed, is_polled=is_polled))
                self.collectors.update(dict.fromkeys([request.id for request in requests], collector))
                collector.open(requests)
        except BaseException:
            for collector in collectors:
                if collector.requests:  # else nothing of it was accepted, and it may be submitted again
                    collector.cancel()
            self._deliver(engine.reap())
            raise

    def _run(self) -> None:
        try:
            while not self.is_stopping:
                self._iterate()
        except BaseException as error:
            log.exception("the engine's thread ends")
            self._failure = BackendError(GAVE_UP.format(error))
        finally:
            self._end()

    def _iterate(self) -> None:
        """Run the calls that arrived, at most one that computes, and one step."""
        if not self._engine.has_work and not self._inbox.has_computing:
            self._accept(self._sleep())
        for _ in range(self._inbox.qsize()):  # not until empty: callers must not keep the engine from stepping
            with suppress(Empty):
                self._accept(self._inbox.get_nowait())
        if (call := self._inbox.next_computing()) is not None:
            self._do(call)
        if self._engine.has_work and not self.is_stopping:
            self._step()
        self._is_busy = False

    def _accept(self, call: EngineCall[Any] | None) -> None:
        if call is not None and call.due_at is not None:
            self._inbox.defer(call, call.due_at)
        elif call is not None:
            self._do(call)

    def _do(self, call: EngineCall[Any]) -> None:
        self._is_busy, self._current_call = True, call
        self.beat()
        self._run_call(call)
        self._current_call = None
        self._recover()
        if not self._idle_memory.is_planned:  # it may have used blocks; asking alone must not put off what is planned
            self._idle_memory.plan(self.heartbeat)

    def _run_call(self, call: EngineCall[Any]) -> None:
        if not call.result.set_running_or_notify_cancel():
            return
        with suppress(InvalidStateError):  # the watchdog was faster
            try:
                result = call.function(self._engine)
            except BaseException as error:  # for the caller to handle
                call.result.set_exception(error)
            else:
                call.result.set_result(result)

    def _step(self) -> None:
        self._is_busy = True
        self.beat()
        events: list[TokenEvent] = []
        try:
            if self.turn.wait():
                try:
                    events = self._engine.step()
                finally:
                    self.turn.leave()
            self._num_failed_steps = 0
        except Exception as error:
            self._fail_step(error)
        self._deliver(events)
        for tell in self.on_step:
            tell()
        self._recover()
        if not self._engine.has_work:
            self._idle_memory.plan(self.heartbeat)
        elif (wait_s := self._engine.wait_s) > 0:  # more requests may share the first step
            with suppress(Empty):
                self._accept(self._inbox.get(timeout=wait_s))

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        """Pass events to their collectors."""
        collector_of = self.collectors.get
        for event in events:
            collector = collector_of(event.request_id)
            if collector is None:
                continue
            if event.finish_reason is not None:
                del self.collectors[event.request_id]
            collector.add(event)

    def _fail_step(self, error: Exception) -> None:
        """An exception that no request caused: end them all, and go on unless it keeps happening."""
        log.exception("a step failed outside any request")
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS or isinstance(error, DeviceLost):
            raise error
        failure = BackendError(f"the engine failed outside any request: {error or type(error).__name__}")
        failure.__cause__ = error
        self._fail_all(failure)

    def _fail_all(self, failure: KvarnError) -> None:
        for collector in list(self.collectors.values()):
            collector.fail(fresh(failure))

    def _sleep(self) -> EngineCall[Any] | None:
        """Wait for something to do; memory goes back to the system meanwhile."""
        while (wait_s := self._idle_memory.next_in_s()) is not None:
            try:
                return self._inbox.get(timeout=wait_s)
            except Empty:
                self._idle_memory.return_next()
        return self._inbox.get()

    def _end(self) -> None:
        """Fail what still runs or waits, then release the model."""
        atexit.unregister(self.stop)
        self.turn.forfeit()
        if self._failure is None:
            self._failure = RequestError(CLOSED)
        self._fail_all(self._failure)
        self._stopped.set()
        self._inbox.refuse_all(self._failure)
        try:
            self._engine.reap()
            self._release()
        except Exception:
            log.exception("the model was not released cleanly")

    def _recover(self) -> None:
        """A stuck step that came back: the engine serves again."""
        self.beat()  # first, so that the watchdog sees it has been too late
        if self._failure is not None:
            log.warning("a step that was stuck has come back after all")
            self._failure = None
