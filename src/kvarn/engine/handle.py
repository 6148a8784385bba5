"""Two ends of a submission: OutputCollector for the engine's thread, RequestHandle for the thread that reads it.

The engine's thread never refers to the caller's end, so a model that nobody refers to can be collected while it works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeVar

from kvarn.checks import check_parameter
from kvarn.errors import BackendError, KvarnError, RequestError
from kvarn.request import Request, RequestState
from kvarn.types import Completion, FinishReason, TokenEvent

T = TypeVar("T")
OnEvent = Callable[[TokenEvent], None]


class OutputCollector:
    """Where the events and the result of one submission go; settled exactly once, by whichever thread is first."""

    def __init__(
        self, on_event: OnEvent | None = None, *, keeps_events: bool = True, polls_tokens: bool = False
    ) -> None:
        """polls_tokens: where tokens are all that is told, the reader takes them from the requests by itself."""
        self.polls_tokens = polls_tokens
        self.requests: tuple[Request, ...] = ()  # one per choice
        self.done: Future[Completion] = Future()
        self.events: SimpleQueue[TokenEvent | None] = SimpleQueue()  # None: no more will come
        self.is_cancelled = False
        self.on_cancel: Callable[[], None] | None = None  # tells an engine that does not see these requests
        self.reads_tokens = keeps_events or on_event is not None  # else all events but the last go nowhere
        self._on_event = on_event
        self._keeps_events = keeps_events
        self._completions: dict[int, Completion] = {}
        self._is_over = False  # settled by this class; read for every token, which the future's lock would slow down

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
        if (tell := self.on_cancel) is not None and not self.is_settled:
            tell()

    def add(self, event: TokenEvent) -> None:
        """Pass one event on; the last one of the last choice settles the result. Called on the engine's thread."""
        if self._is_over:
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
        self._is_over = True
        settle(self.done, error=error)
        self.events.put(None)

    def _complete(self, choice: int, completion: Completion) -> None:
        self._completions[choice] = completion
        if len(self._completions) < len(self.requests):
            return
        self._is_over = True
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
