"""In which part of its life the server is, and what follows from that for requests and connections.

    starting ──ready──> ready ──SIGTERM──> draining ──drain_delay──> refusing ──all done, or deadline──> stopped
       refuses            takes requests ─────────────┘ still runs what it took

Knows times and counts; the process around it (serve.py) moves it forward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from kvarn.errors import CapacityError

Phase = Literal["starting", "ready", "draining", "refusing", "stopped"]
Clock = Callable[[], float]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_AFTER_S = 1.0
UNGATED = ("/health", "/metrics")  # answer in every phase, and nobody waits for them


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
    seconds: float | None


class Lifecycle:
    """Used in one event loop. Requests enter and leave; the process waits until none is left."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.phase: Phase = "starting"
        self.num_requests = 0
        self.stuck_model: Callable[[], str | None] = lambda: None  # whose engine makes no progress: the watchdog's word
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

    def begin_step(self, name: str) -> None:
        """Name what is being done to start up; ends the step before."""
        self._end_step()
        self._steps.append(StartupPhase(name, None))

    def become_ready(self) -> None:
        """The warm-up is done: take requests."""
        self._end_step()
        assert self.phase == "starting"
        self.phase = "ready"

    def drain(self) -> None:
        """SIGTERM: say not ready at once, go on taking requests for the delay."""
        assert self.phase == "ready"
        self.phase = "draining"

    def refuse(self) -> None:
        """The delay is over: new requests are turned away."""
        self.phase = "refusing"

    def stop(self) -> None:
        """The deadline has passed, or nothing is left to do; whoever still waits for an answer to begin is told so."""
        if not self._is_stopped:
            self.phase = "stopped"
            for task in self._unanswered:
                task.cancel()

    def refusal(self) -> CapacityError | None:
        """Why a new request is turned away; None: it is not."""
        if self.accepts_requests:
            return None
        return NotReady() if self.phase == "starting" else ShuttingDown()

    def enter(self) -> None:
        """A request begins; leave() when its last byte is out."""
        self.num_requests += 1
        self._idle.clear()

    def leave(self) -> None:
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
            if self._is_stopped and task.uncancel() == 0:  # unless somebody else cancelled it too
                raise ShuttingDown from None
            raise
        finally:
            self._unanswered.discard(task)

    @property
    def _is_stopped(self) -> bool:
        return self.phase == "stopped"

    def _end_step(self) -> None:
        if self._steps and self._steps[-1].seconds is None:
            self._steps[-1] = StartupPhase(self._steps[-1].name, self._clock() - self._step_began)
        self._step_began = self._clock()


class LifecycleGate:
    """ASGI: counts requests, turns new ones away when their time is over, and says `connection: close` then.

    refuse(error) makes the response to a request that is turned away.
    """

    def __init__(self, app: App, *, lifecycle: Lifecycle, refuse: Callable[[Exception], App]) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        closing = self._closing(send)
        if is_ungated(scope["path"]):
            await self._app(scope, receive, closing)
            return
        refusal = self._lifecycle.refusal()
        self._lifecycle.enter()
        try:
            app = self._app if refusal is None else self._refuse(refusal)
            await app(scope, receive, closing)
        finally:
            self._lifecycle.leave()

    def _closing(self, send: Send) -> Send:
        async def with_close(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and self._lifecycle.closes_connections:
                headers = [one for one in message.get("headers", []) if one[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        return with_close


def is_ungated(path: str) -> bool:
    """Whether a path answers in every phase."""
    return any(path == one or path.startswith(one + "/") for one in UNGATED)
