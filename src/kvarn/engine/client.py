"""The one way to an engine: any thread or event loop may submit, stream, cancel, call, drain and close.

    callers ──submit──> EngineThread ──step──> Engine
       └── EventStream, RequestHandle (threads), AsyncAnswers (asyncio) <──events, result── OutputCollector <──┘

Knows nothing of scheduling, models or text.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvarn.checks import check_parameter
from kvarn.engine.engine import Engine
from kvarn.engine.engine_arbiter import EngineArbiter, process_arbiter
from kvarn.engine.handle import OnEvent, OutputCollector, RequestHandle
from kvarn.engine.submission import Submission
from kvarn.engine.thread import STOP_TIMEOUT_S, EngineThread
from kvarn.errors import BackendError, Cancelled, CapacityError, RequestError
from kvarn.types import Completion, TokenEvent

if TYPE_CHECKING:
    import asyncio

    from kvarn.engine.delivery.async_answers import AsyncAnswers, OnArrival, Submit
    from kvarn.engine.delivery.event_loop_bridge import EventLoopBridge
    from kvarn.engine.process.remote_engine import RemoteEngine

T = TypeVar("T")
STEP_TIMEOUT_S = 120.0


class EngineClient:
    """Dropping the last reference stops the thread, as close() does; handles count as references."""

    def __init__(
        self,
        engine: Engine | RemoteEngine,
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
        release: Callable[[], None] | None = None,
        arbiter: EngineArbiter | None = None,
    ) -> None:
        """release is called once, when nothing uses the backend any more. arbiter: by default the device's."""
        self._admission = engine.admission
        self._wave_size = -(-engine.config.queue_limit // 4)
        self._thread: EngineThread | RemoteEngine
        if isinstance(engine, Engine):
            arbiter = arbiter or process_arbiter(engine.config.device)
            self._thread = EngineThread(engine, step_timeout_s, release or _nothing, arbiter)
        else:
            self._thread, engine.release = engine, release or _nothing
        self._bridges: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EventLoopBridge] = (
            weakref.WeakKeyDictionary()
        )
        self._bridges_lock = threading.Lock()
        # A finaliser may run while its thread holds any lock, so it only asks.
        weakref.finalize(self, self._thread.ask_to_stop).atexit = False
        self._thread.start()
        if isinstance(engine, Engine) and engine.scheduler.prefix_reuse.disk is not None:
            from kvarn.engine.persistence.open_store import start_disk

            start_disk(engine, self._thread.call)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and no step is stuck: what a liveness probe wants to know."""
        return self._thread.is_alive and not self.is_stuck()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, as last seen."""
        return self._thread.num_waiting

    @property
    def heartbeat(self) -> float:
        """time.monotonic() at the last sign of life; an idle thread gives none."""
        return self._thread.heartbeat

    @property
    def sign_of_life(self) -> tuple[float, int] | None:
        """Differs from the last one as long as work advances, also within a long native step; None while idle."""
        return self._thread.sign_of_life

    def is_stuck(self, step_timeout_s: float | None = None) -> bool:
        """Whether the step in flight has been running longer than step_timeout_s (default: the configuration's)."""
        return self._thread.busy_s > (self._thread.step_timeout_s if step_timeout_s is None else step_timeout_s)

    def submit(self, submission: Submission, on_event: OnEvent | None = None) -> RequestHandle:
        """Queue a request, or raise why not. on_event is called on the engine's thread: be brief there."""
        (handle,) = self.submit_all([submission], OutputCollector(on_event))
        return handle

    def submit_all(self, submissions: Sequence[Submission], *collectors: OutputCollector) -> list[RequestHandle]:
        """Queue several requests at once; when one is refused, none is started."""
        try:
            self._thread.submit(submissions, collectors).result()
        except BaseException:  # refused, or Ctrl-C while waiting for the answer
            for collector in collectors:
                collector.cancel()
            raise
        return [RequestHandle(collector, self, self._thread.thread) for collector in collectors]

    def complete(
        self,
        submissions: Sequence[Submission],
        watch: Callable[[Sequence[Future[Completion]]], None] | None = None,
    ) -> list[Completion]:
        """Wait for all answers; when the wait is interrupted, they are cancelled. watch: may wait with them.

        All are checked before one is started; more than a share of the queue enter it as others end, and wait where
        others have filled it or a rate is used up.
        """
        admitted = [self._admission.admit(submission) for submission in submissions]
        collectors = [OutputCollector(keeps_events=False) for _ in admitted]
        waves = Waves(self._thread.submit, admitted, collectors, lambda: not self._thread.is_draining)
        try:
            waves.start(max(1, self._wave_size // max(one.params.n for one in admitted))).result()
            if watch is not None:
                watch([collector.done for collector in collectors])
            return [RequestHandle(one, self, self._thread.thread).result() for one in collectors]
        except BaseException:
            waves.stop()
            for collector in collectors:
                collector.cancel()
            raise

    def stream_async(
        self, num_submissions: int, on_arrival: OnArrival | None = None, *, polls_tokens: bool = False
    ) -> AsyncAnswers:
        """The answers to so many submissions, for the running event loop; AsyncAnswers.submit() queues them.

        polls_tokens: an event may tell of several tokens, where the event loop is behind.
        """
        from kvarn.engine.delivery.async_answers import AsyncAnswers

        submit = self._thread.submit
        return AsyncAnswers(self._bridge(), submit, num_submissions, on_arrival, polls_tokens=polls_tokens)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function on the engine's thread between two steps; nothing that computes, see compute()."""
        return self._thread.call(function)

    def compute(self, function: Callable[[Engine], T], num_tokens: int = 0, *, priority: int = 0) -> Future[T]:
        """Run a function that computes in the engine's turn, once num_tokens fit beside the running requests.

        The priority is that of the turn among the engines of the process, and orders the functions that wait for this
        one: they age as requests do, and one is run between two steps. A long function calls engine.offer_turn() now
        and then: it is alive, and other engines may step.
        """
        return self._thread.compute(function, num_tokens, priority)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more and wait for what runs; whether all of it ended in time."""
        check_parameter.number("timeout_s", timeout_s, 0.0, threading.TIMEOUT_MAX, optional=True)
        if threading.current_thread() is self._thread.thread:
            raise RequestError("draining inside on_token would wait for ever; do it on another thread")
        collectors = self._thread.begin_drain().result()
        return not wait([collector.done for collector in collectors], timeout_s).not_done

    def close(self) -> None:
        """End what runs with an error, stop the thread and release the model; later calls raise."""
        if not self._thread.stop(STOP_TIMEOUT_S):
            raise BackendError("a step is still running; the model's memory is freed when it ends")

    def _bridge(self) -> EventLoopBridge:
        """The way from the engine's thread into the running event loop, shared by all its streams."""
        import asyncio

        from kvarn.engine.delivery.event_loop_bridge import EventLoopBridge

        loop = asyncio.get_running_loop()
        with self._bridges_lock:
            if loop not in self._bridges:
                self._bridges[loop] = EventLoopBridge(loop)
                self._thread.on_step = tuple(bridge.end_step for bridge in self._bridges.values())
            return self._bridges[loop]


class Waves:
    """More submissions than an engine should queue: some at once, and one more for each that ends, by whom it ends."""

    def __init__(
        self,
        submit: Submit,
        submissions: Sequence[Submission],
        collectors: Sequence[OutputCollector],
        may_retry: Callable[[], bool],
    ) -> None:
        """may_retry: whether the engine will have room again."""
        self._submit = submit
        self._may_retry = may_retry
        self._left = deque(zip(submissions, collectors, strict=True))

    def start(self, count: int) -> Future[None]:
        """Submit the first of them, together; the future tells whether they were accepted."""
        first = [self._left.popleft() for _ in range(min(count, len(self._left)))]
        for _, collector in (*first, *self._left):
            collector.done.add_done_callback(self._submit_next)
        return self._submit([submission for submission, _ in first], [collector for _, collector in first])

    def stop(self) -> None:
        """Submit nothing more; nobody waits for the rest."""
        self._left.clear()

    def _submit_next(self, ended: Future[Any]) -> None:
        if (error := ended.exception()) is not None:
            self._give_up(error)
        self._submit_one()

    def _submit_one(self) -> None:
        try:
            submission, collector = self._left.popleft()
        except IndexError:  # all are submitted, or another thread has stopped it
            return
        self._submit([submission], [collector]).add_done_callback(partial(self._accepted, submission, collector))

    def _accepted(self, submission: Submission, collector: OutputCollector, accepted: Future[None]) -> None:
        error = accepted.exception()
        if isinstance(error, CapacityError) and self._may_retry():  # later: what has been answered is not lost
            self._left.appendleft((submission, collector))
            retry = threading.Timer(error.retry_after_s, self._submit_one)
            retry.daemon = True
            retry.start()
        elif error is not None:
            collector.fail(error)  # and the rest with it, as that ends it

    def _give_up(self, error: BaseException) -> None:
        left = [collector for _, collector in self._left]
        self._left.clear()  # first: each that fails asks for the next
        for collector in left:
            collector.fail(error)


class EventStream:
    """Events of one request as they come; closing or dropping it cancels the request."""

    def __init__(self, handle: RequestHandle, finish: Callable[[Completion], Completion] | None = None) -> None:
        """finish: what is made of the whole result before it is given out."""
        self._handle = handle
        self._finish = finish
        self._is_closed = False

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> TokenEvent:
        if self._is_closed:
            raise StopIteration
        event = next(self._handle)
        if self._finish is None or event.completion is None:
            return event
        return replace(event, completion=self._finish(event.completion))

    def completion(self) -> Completion:
        """Wait for the whole result."""
        if self._is_closed:
            raise Cancelled(f"the stream of request {self._handle.id} was closed before")
        completion = self._handle.result()
        return completion if self._finish is None else self._finish(completion)

    def cancel(self) -> None:
        """Ask for the end: the next event is the last, with what was said so far. Safe in a signal handler."""
        self._handle.cancel()

    def close(self) -> None:
        """Cancel what is left and throw it away."""
        self._is_closed = True
        self._handle.cancel()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _nothing() -> None:
    pass
