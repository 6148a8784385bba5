"""Two ends of a submission: OutputCollector for the engine's thread; RequestHandle and AsyncAnswers for its readers.

The engine's thread never refers to the caller's end, so a model that nobody refers to can be collected while it works.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kvarn.checks import check_parameter
from kvarn.engine.submission import Submission
from kvarn.errors import BackendError, KvarnError, RequestError
from kvarn.request import Request, RequestState
from kvarn.types import Completion, FinishReason, TokenEvent

T = TypeVar("T")
OnEvent = Callable[[TokenEvent], None]


class OutputCollector:
    """Where the events and the result of one submission go; settled exactly once, by whichever thread is first."""

    def __init__(self, on_event: OnEvent | None = None, *, keeps_events: bool = True) -> None:
        self.requests: tuple[Request, ...] = ()  # one per choice
        self.done: Future[Completion] = Future()
        self.events: SimpleQueue[TokenEvent | None] = SimpleQueue()  # None: no more will come
        self.is_cancelled = False
        self.reads_tokens = keeps_events or on_event is not None  # else all events but the last go nowhere
        self._on_event = on_event
        self._keeps_events = keeps_events
        self._completions: dict[int, Completion] = {}

    @property
    def is_settled(self) -> bool:
        return self.done.done()

    def open(self, requests: tuple[Request, ...]) -> None:
        """Take the engine's requests, one per choice; a cancellation that came first counts."""
        self.requests = requests
        if self.is_cancelled:
            self.cancel()

    def cancel(self) -> None:
        """Ask for the end within one step. Takes no lock: safe in signal handlers and finalisers."""
        self.is_cancelled = True
        for request in self.requests:
            request.is_cancel_requested = True

    def add(self, event: TokenEvent) -> None:
        """Pass one event on; the last one of the last choice settles the result. Called on the engine's thread."""
        if self.is_settled:
            return
        if event.finish_reason is FinishReason.FAILED:
            self.fail(self._error())
            return
        try:
            if self._on_event is not None:
                self._on_event(event)
        except Exception as error:
            self.fail(_callback_failed(event, error))
            return
        if self._keeps_events:
            self.events.put(event)
        if event.completion is not None:
            self._complete(event.choice, event.completion)

    def fail(self, error: BaseException) -> None:
        """End with an error, and ask the engine to end what still runs."""
        self.cancel()
        settle(self.done, error=error)
        self.events.put(None)

    def _complete(self, choice: int, completion: Completion) -> None:
        self._completions[choice] = completion
        if len(self._completions) < len(self.requests):
            return
        first, *others = (self._completions[choice] for choice in sorted(self._completions))
        settle(self.done, result=replace(first, alternatives=tuple(others)) if others else first)
        self.events.put(None)

    def _error(self) -> KvarnError:
        return next((one.error for one in self.requests if one.error), BackendError("the request failed"))


class RequestHandle:
    """A submitted request: wait for its result, iterate over its events, or cancel it. Dropping it changes nothing."""

    def __init__(self, collector: OutputCollector, owner: object, engine_thread: threading.Thread) -> None:
        self._collector = collector
        self._owner = owner  # keeps the model loaded while this answer may still be asked for
        self._engine_thread = engine_thread
        self._is_over = False

    @property
    def id(self) -> str:
        return self._collector.requests[0].id

    @property
    def state(self) -> RequestState:
        """Of the first choice that has not ended, else of the first."""
        requests = self._collector.requests
        return next((request.state for request in requests if not request.is_ended), requests[0].state)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer; a cancelled one has what was said. TimeoutError leaves the request running."""
        check_parameter.number("timeout", timeout, 0.0, threading.TIMEOUT_MAX, optional=True)
        if not self._collector.is_settled:
            self._refuse_on_the_engines_thread()
        return self._collector.done.result(timeout)

    def cancel(self) -> None:
        """Ask for the end: the next event is the last. Without effect on an ended request; safe anywhere."""
        self._collector.cancel()

    def __iter__(self) -> RequestHandle:
        return self

    def __next__(self) -> TokenEvent:
        if self._is_over:
            raise StopIteration
        self._refuse_on_the_engines_thread()
        event = self._collector.events.get()
        if event is not None:
            return event
        self._is_over = True
        error = self._collector.done.exception()
        if error is not None:
            raise error
        raise StopIteration

    def _refuse_on_the_engines_thread(self) -> None:
        if threading.current_thread() is self._engine_thread:
            raise RequestError("waiting for an answer inside on_token would wait for ever; do it on another thread")


class EventLoopBridge:
    """From the engine's thread into one event loop: the events of a whole step cost one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_scheduled = False

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Have function(*args) called in the event loop; RuntimeError when that is closed."""
        loop = self.loop()
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
        self._arrival = asyncio.Event()  # wakes every reader
        self._bridge = bridge
        for index in range(number):
            on_event = None if on_arrival is drop_event else partial(bridge.post, self._add, index)
            collector = OutputCollector(on_event, keeps_events=False)
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

    def release(self) -> None:
        """Cancel what still runs and let go of it: a cycle would keep it in memory until the garbage collector runs."""
        self.cancel()
        self.collectors = []
        self._on_arrival = drop_event

    def fail(self, error: BaseException) -> None:
        """End with an error, once the events that are ready have been read."""
        if self.error is None and self.num_open:
            self.error = error
        self.cancel()
        self._arrival.set()

    async def _arrived(self) -> None:
        """Wait until an event is ready; raise the error, or StopAsyncIteration when all is over."""
        if asyncio.get_running_loop() is not self._bridge.loop():
            raise RuntimeError("the answers of one event loop are read in a different event loop")
        while not self._ready:
            if self.error is not None:
                raise self.error
            if self.num_open == 0:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()

    def _add(self, index: int, event: TokenEvent) -> None:
        try:
            is_kept = self._on_arrival is None or self._on_arrival(index, event)
        except Exception as error:  # the events of other answers come through the same bridge
            self.fail(error)
            return
        if is_kept:
            self._ready.append((index, event))
            self._arrival.set()

    def _end(self, error: BaseException | None) -> None:
        """One of the collectors is settled."""
        self.num_open = max(self.num_open - 1, 0)
        if error is not None:
            self.error = self.error or error
            self.cancel()
        self._arrival.set()


def drop_event(_: int, __: TokenEvent) -> bool:
    """An OnArrival of readers that want the results alone."""
    return False


def settle(future: Future[T], *, result: T | None = None, error: BaseException | None = None) -> None:
    """Give a future its end, unless another thread (the watchdog, a caller that gave up) was faster."""
    with suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]


def _callback_failed(event: TokenEvent, error: Exception) -> RequestError:
    raised = f"{type(error).__name__}: {error}"
    failure = RequestError(f"on_token of request {event.request_id} raised {raised}; the request was cancelled")
    failure.__cause__ = error
    return failure


def _post_end(bridge: EventLoopBridge, end: Callable[[BaseException | None], None], done: Future[Completion]) -> None:
    with suppress(RuntimeError):  # the event loop is closed: no reader is left
        bridge.post(end, done.exception())
