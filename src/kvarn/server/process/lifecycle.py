"""The phase of the server's life, and what follows from it for requests and connections.

    starting ──ready──> ready ──SIGTERM──> draining ──drain_delay──> refusing ──all done, or deadline──> stopped
       refuses            takes requests ─────────────┘ still runs what it took

Knows times and counts; the process around it (serve.py) moves it forward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvarn.errors import CapacityError

Phase = Literal["starting", "ready", "draining", "refusing", "stopped"]
Clock = Callable[[], float]

RETRY_AFTER_S = 1.0
PROBES = ("/health", "/metrics")  # and what is below them; a drain does not wait for these


class ShuttingDown(CapacityError):
    """This process takes no more requests, or could not finish one in time; another one may."""

    def __init__(self, message: str = "the server is shutting down; ask again, another one may answer") -> None:
        super().__init__(message, retry_after_s=RETRY_AFTER_S)


class NotReady(CapacityError):
    """The first model is still being loaded."""

    def __init__(self) -> None:
        super().__init__("the server is still starting; see /health/startup", retry_after_s=RETRY_AFTER_S)


@dataclass(frozen=True, slots=True)
class StartupPhase:
    """One step of starting up; seconds are None while it runs."""

    name: str
    model: str
    seconds: float | None


class Lifecycle:
    """For one event loop. Counts the running requests; the process waits until none is left."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.phase: Phase = "starting"
        self.num_requests = 0
        self.stuck_model: Callable[[], str | None] = lambda: (
            None
        )  # the one whose engine makes no progress; set to the watchdog's
        self._clock = clock
        self._steps: list[StartupPhase] = []
        self._step_began = clock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._unanswered: set[asyncio.Task[Any]] = set()  # tasks that may be ended with ShuttingDown

    @property
    def accepts_requests(self) -> bool:
        return self.phase in ("ready", "draining")

    @property
    def is_ready(self) -> bool:
        """Whether more requests should be sent here."""
        return self.phase == "ready"

    @property
    def is_started(self) -> bool:
        return self.phase != "starting"

    @property
    def closes_connections(self) -> bool:
        """Whether each response is the last of its connection."""
        return self.phase in ("refusing", "stopped")

    @property
    def steps(self) -> tuple[StartupPhase, ...]:
        """What starting up consists of, up to now."""
        return tuple(self._steps)

    def begin_step(self, name: str, model: str) -> None:
        """Name what is being done to start up, and for which model; ends the step before."""
        self._end_step()
        self._steps.append(StartupPhase(name, model, None))

    def become_ready(self) -> None:
        """The warm-up is done: take requests."""
        self._end_step()
        assert self.phase == "starting"
        self.phase = "ready"

    def drain(self) -> None:
        """SIGTERM: not ready at once, but requests are still accepted during the delay."""
        assert self.phase == "ready"
        self.phase = "draining"

    def refuse(self) -> None:
        """The delay is over: new requests are refused."""
        self.phase = "refusing"

    def stop(self) -> None:
        """The deadline has passed, or nothing is left to do; requests whose response has not begun are refused."""
        if not self._is_stopped:
            self.phase = "stopped"
            for task in self._unanswered:
                task.cancel()

    def refusal(self) -> CapacityError | None:
        """Why a new request is refused; None: it is not."""
        if self.accepts_requests:
            return None
        return NotReady() if self.phase == "starting" else ShuttingDown()

    @contextmanager
    def counted_request(self) -> Iterator[None]:
        """A request runs until the block ends, which is when its last byte is out."""
        self.num_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            if self.num_requests == 0:
                self._idle.set()

    async def until_idle(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    @contextmanager
    def ends_at_stop(self) -> Iterator[None]:
        """Whatever is awaited inside ends with ShuttingDown when the deadline passes, or has passed."""
        if self._is_stopped:
            raise ShuttingDown
        task = asyncio.current_task()
        assert task is not None
        self._unanswered.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._is_stopped and task.uncancel() == 0:  # unless it was cancelled for another reason too
                raise ShuttingDown from None
            raise
        finally:
            self._unanswered.discard(task)

    @property
    def _is_stopped(self) -> bool:
        return self.phase == "stopped"

    def _end_step(self) -> None:
        if self._steps and self._steps[-1].seconds is None:
            self._steps[-1] = replace(self._steps[-1], seconds=self._clock() - self._step_began)
        self._step_began = self._clock()


def is_probe(path: str) -> bool:
    """Whether a path answers in every phase, without being counted or logged."""
    return any(path == one or path.startswith(one + "/") for one in PROBES)
