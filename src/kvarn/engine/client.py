"""The one way to an engine: any thread or event loop may submit, stream, cancel, call, drain and close.

    callers ──submit──> EngineThread ──step──> Engine
       └── RequestHandle, EventStream (threads), AsyncAnswers (asyncio) <──events, result── OutputCollector <──┘

Knows nothing of scheduling, models or text.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from kvarn.engine.engine import Engine
from kvarn.engine.engine_arbiter import EngineArbiter, process_arbiter
from kvarn.engine.handle import OnEvent, OutputCollector, RequestHandle
from kvarn.engine.submission import Submission
from kvarn.engine.thread import STOP_TIMEOUT_S, EngineThread
from kvarn.errors import BackendError, RequestError
from kvarn.types import Completion, TokenEvent

T = TypeVar("T")
STEP_TIMEOUT_S = 120.0


class EngineClient:
    """Dropping the last reference stops the thread, as close() does; handles count as references."""

    def __init__(
        self,
        engine: Engine,
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
        release: Callable[[], None] | None = None,
        arbiter: EngineArbiter | None = None,
    ) -> None:
        """release is called once, when nothing uses the backend any more. arbiter: by default the process's."""
        self._thread = EngineThread(engine, step_timeout_s, release or _nothing, arbiter or process_arbiter())
        self._bridges: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EventLoopBridge] = (
            weakref.WeakKeyDictionary()
        )
        self._bridges_lock = threading.Lock()
        # A finaliser may run while its thread holds any lock, so it only asks.
        weakref.finalize(self, self._thread.ask_to_stop).atexit = False
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and no step is stuck: what a liveness probe wants to know."""
        return self._thread.is_alive and not self.is_stuck()

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

    def stream_async(self, num_submissions: int, on_arrival: OnArrival | None = None) -> AsyncAnswers:
        """The answers to so many submissions, for the running event loop; AsyncAnswers.submit() queues them."""
        return AsyncAnswers(self._bridge(), self._thread.submit, num_submissions, on_arrival)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function on the engine's thread between two steps; nothing that computes, see compute()."""
        return self._thread.call(function)

    def compute(self, function: Callable[[Engine], T], num_tokens: int = 0, *, priority: int = 0) -> Future[T]:
        """Run a function that computes in the engine's turn, once num_tokens fit beside the running requests.

        The priority is that of the turn among the engines of the process, and orders the functions that wait for this
        one: they age as requests do, and one is run between two steps.
        """
        return self._thread.compute(function, num_tokens, priority)

    def offer_turn(self) -> None:
        """Called by a long function inside compute(), between its steps: it is alive, and other engines may step."""
        self._thread.turn.offer()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more and wait for what runs; whether all of it ended in time."""
        if threading.current_thread() is self._thread.thread:
            raise RequestError("draining inside on_token would wait for ever; do it on another thread")
        self._thread.is_draining = True
        collectors = self.call(lambda _: list(self._thread.collectors.values())).result()
        return not wait([collector.done for collector in collectors], timeout_s).not_done

    def close(self) -> None:
        """End what runs with an error, stop the thread and release the model; later calls raise."""
        if not self._thread.stop(STOP_TIMEOUT_S):
            raise BackendError("a step is still running; the model's memory is freed when it ends")

    def _bridge(self) -> EventLoopBridge:
        """The way from the engine's thread into the running event loop, shared by all its streams."""
        loop = asyncio.get_running_loop()
        with self._bridges_lock:
            if loop not in self._bridges:
                self._bridges[loop] = EventLoopBridge(loop)
            return self._bridges[loop]


class EventLoopBridge:
    """From the engine's thread into one event loop: the events of a whole step cost one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_scheduled = False

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Have function(*args) called in the event loop; RuntimeError when that is closed."""
        loop = self._loop()
        if loop is None or loop.is_closed():  # asked each time: a call it took before may never have been made
            self._posted.clear()
            raise RuntimeError("the event loop is closed")
        self._posted.append((function, args))
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon_threadsafe(self._run_posted)

    def _run_posted(self) -> None:
        # Cleared first: a post while this runs is either seen below or schedules another call.
        self._is_scheduled = False
        while self._posted:
            function, args = self._posted.popleft()
            function(*args)


IndexedEvent = tuple[int, TokenEvent]  # which of the submissions it belongs to
OnArrival = Callable[[int, TokenEvent], bool]  # called in the event loop; False: the event is not kept for readers
Submit = Callable[[Sequence[Submission], Sequence[OutputCollector]], "Future[None]"]


class AsyncAnswers:
    """The answers to submissions sent together, read in one event loop as their events arrive."""

    def __init__(self, bridge: EventLoopBridge, submit: Submit, number: int, on_arrival: OnArrival | None) -> None:
        self.error: BaseException | None = None
        self.num_open = number
        self.collectors: list[OutputCollector] = []
        self._submit = submit
        self._on_arrival = on_arrival
        self._ready: deque[IndexedEvent] = deque()
        self._arrival: asyncio.Future[None] | None = None
        for index in range(number):
            collector = OutputCollector(partial(bridge.post, self._add, index), keeps_events=False)
            collector.done.add_done_callback(partial(_post_end, bridge, self._end))
            self.collectors.append(collector)

    async def submit(self, submissions: Sequence[Submission]) -> None:
        """Queue the submissions all together, or raise why none of them is accepted."""
        await asyncio.wrap_future(self._submit(submissions, self.collectors))

    def __aiter__(self) -> AsyncIterator[IndexedEvent]:
        return self

    async def __anext__(self) -> IndexedEvent:
        await self._arrived()
        return self._ready.popleft()

    async def batches(self) -> AsyncIterator[list[IndexedEvent]]:
        """Events as they arrive, all that are ready at once together."""
        while True:
            try:
                await self._arrived()
            except StopAsyncIteration:
                return
            batch = list(self._ready)
            self._ready.clear()
            yield batch

    async def results(self) -> list[Completion]:
        """Wait for all results, one for each submission."""
        async for _ in self:
            pass
        return [collector.done.result() for collector in self.collectors]

    @property
    def num_unread(self) -> int:
        return len(self._ready)

    def cancel(self) -> None:
        """Ask for the end: what was said so far is the result. Safe on any thread."""
        for collector in self.collectors:
            collector.cancel()

    def fail(self, error: BaseException) -> None:
        """End with an error, once the events that are ready have been read."""
        if self.error is None and self.num_open:
            self.error = error
        self.cancel()
        self._wake()

    async def _arrived(self) -> None:
        """Wait until an event is ready; raise the error, or StopAsyncIteration when all is over."""
        while not self._ready:
            if self.error is not None:
                raise self.error
            if self.num_open == 0:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def _add(self, index: int, event: TokenEvent) -> None:
        if self._on_arrival is None or self._on_arrival(index, event):
            self._ready.append((index, event))
            self._wake()

    def _end(self, error: BaseException | None) -> None:
        """One of the collectors is settled."""
        self.num_open = max(self.num_open - 1, 0)
        if error is not None:
            self.error = self.error or error
            self.cancel()
        if error is not None or self.num_open == 0:
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def _post_end(bridge: EventLoopBridge, end: Callable[[BaseException | None], None], done: Future[Completion]) -> None:
    with suppress(RuntimeError):  # the event loop is closed: no reader is left
        bridge.post(end, done.exception())


def _nothing() -> None:
    pass
