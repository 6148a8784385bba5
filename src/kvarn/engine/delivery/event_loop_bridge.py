"""From the engine's thread into an event loop: what was posted, and readers that look for tokens, in one drain.

    engine's thread    post() and end_step(), which wake the event loop unless that is awake or behind
    event loop         a drain: what was posted, then every reader. Where the loop is behind, drains wait, but the ends
                       of answers do not

Knows when; knows nothing of answers.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from kvarn.engine.delivery.drain_pacing import DrainPacing


class Reader(Protocol):
    """Who takes tokens from requests."""

    def poll(self) -> None:
        """Look for new tokens. Called in the event loop after a step."""


class EventLoopBridge:
    """Calls what was posted, and lets readers look for tokens, all in one drain."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.polling: dict[Reader, None] = {}  # changed in the event loop alone
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_scheduled = False
        self._is_hurrying = False
        self._num_steps = 0
        self._num_arrived = 0  # answers that were accepted since the last drain
        self._pacing = DrainPacing()
        self._due_at = 0.0
        self.is_behind = False  # what comes waits for the next drain

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Have function(*args) called in the event loop by the next drain; RuntimeError when that is closed."""
        loop = self._open_loop()
        self._posted.append((function, args))
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon_threadsafe(self._drain_when_due)

    def post_end(self, function: Callable[..., None], *args: Any) -> None:
        """The same for the end of an answer, which no drain has to be due for: a client waits for it to go on."""
        loop = self._open_loop()
        self._posted.append((function, args))
        if not self._is_hurrying:
            self._is_hurrying = True
            loop.call_soon_threadsafe(self._hurry)

    def add_arrival(self) -> None:
        """An answer was accepted. Called in the event loop."""
        self._num_arrived += 1

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        loop = self.loop()
        if loop is None or loop.is_closed():  # asked each time: a call it took before may never have been made
            self._posted.clear()
            raise RuntimeError("the event loop is closed")
        return loop

    def end_step(self) -> None:
        """Let readers look for tokens. Called on the engine's thread after every step."""
        self._num_steps += 1
        if self.polling and not self._is_scheduled and (loop := self.loop()) is not None:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the event loop is closed: no reader is left
                loop.call_soon_threadsafe(self._drain_when_due)

    def _drain_when_due(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._due_at:
            loop.call_at(self._due_at, self._drain)
        else:
            self._drain()

    def _drain(self) -> None:
        # Cleared first: a post or a token while this runs is either seen below or schedules another drain.
        self._is_scheduled = False
        loop = asyncio.get_running_loop()
        began_at, num_steps, cpu_s = loop.time(), self._num_steps, time.thread_time()
        self._call_posted()
        for reader in tuple(self.polling):
            reader.poll()
        loop.call_soon(self._end_drain, began_at, num_steps, cpu_s)  # after the tasks that this has woken

    def _hurry(self) -> None:
        self._is_hurrying = False  # cleared first, as above
        self._call_posted()

    def _call_posted(self) -> None:
        while self._posted:
            function, args = self._posted.popleft()
            function(*args)

    def _end_drain(self, began_at: float, num_steps: int, cpu_s: float) -> None:
        work_s = time.thread_time() - cpu_s
        self._due_at = self._pacing.next_at(began_at, work_s, num_steps, self._num_arrived)
        self._num_arrived = 0
        self.is_behind = self._due_at > began_at
