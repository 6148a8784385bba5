"""Who drives the engine: callers take turns, each stepping it for everybody while it waits for its own events.

No thread of its own yet; a step's events go to the mailboxes of their requests, so any number of threads may
stream at once and share batches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvarn.engine.engine import Engine
from kvarn.errors import RequestError
from kvarn.request import Request
from kvarn.types import Completion, FinishReason, SamplingParams, TokenEvent


class Runner:
    """Thread-safe submit, cancel and waiting around one Engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._mail: dict[str, deque[TokenEvent]] = {}
        self._is_closed = False

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, starts_text: bool = False) -> EventStream:
        """Queue a request; its events are computed as they are asked for."""
        with self._lock:
            self._require_open()
            request = self._engine.submit(prompt_ids, params, starts_text=starts_text)
            self._mail[request.id] = deque()
        return EventStream(self, request)

    def next_event(self, request: Request) -> TokenEvent:
        """The request's next event, stepping the engine until there is one."""
        mail = self._mail[request.id]
        while not mail:
            with self._lock:
                if not mail:
                    self._require_open()
                    self._deliver(self._engine.step())
        event = mail.popleft()
        if event.finish_reason is not None:
            del self._mail[request.id]
        return event

    def cancel(self, request: Request) -> None:
        """Ask for the end of a request; its blocks are free at the next step at the latest."""
        request.is_cancel_requested = True
        # Never wait here: the garbage collector may call this inside a step of the same thread.
        if self._lock.acquire(blocking=False):
            try:
                self._deliver(self._engine.reap())
            finally:
                self._lock.release()

    def forget(self, request: Request) -> None:
        """Throw away the mail of a request nobody listens to any more."""
        self._mail.pop(request.id, None)

    @contextmanager
    def exclusively(self, num_tokens: int) -> Iterator[Engine]:
        """Hold the engine for one whole pass, once num_tokens fit beside the running requests."""
        with self._lock:
            self._require_open()
            while not self._engine.scheduler.has_room(num_tokens) and self._engine.has_work:
                self._deliver(self._engine.step())
            yield self._engine

    def close(self, release: Callable[[], None]) -> None:
        """Refuse everything from now on and call release once, when no step is running."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                release()

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            mail = self._mail.get(event.request_id)
            if mail is not None:
                mail.append(event)

    def _require_open(self) -> None:
        if self._is_closed:
            raise RequestError("this LLM is closed; make a new one")


class EventStream:
    """Events of one request, computed as they are taken; closing or dropping it cancels the request."""

    def __init__(self, runner: Runner, request: Request) -> None:
        self._runner = runner
        self._request = request
        self._is_over = False

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> TokenEvent:
        if self._is_over:
            raise StopIteration
        event = self._runner.next_event(self._request)
        if event.finish_reason is not None:
            self._is_over = True
        if event.finish_reason is FinishReason.FAILED and self._request.error is not None:
            raise self._request.error
        return event

    def completion(self) -> Completion:
        """Run to the end and return the whole result."""
        for event in self:
            if event.completion is not None:
                return event.completion
        raise RequestError(f"request {self._request.id} was cancelled or read to its end before")

    def cancel(self) -> None:
        """Ask for the end: the next event is the last, with what was said so far. Safe in a signal handler."""
        self._request.is_cancel_requested = True

    def close(self) -> None:
        """Cancel what is left and throw it away."""
        if not self._is_over:
            self._is_over = True
            self._runner.cancel(self._request)
            self._runner.forget(self._request)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
