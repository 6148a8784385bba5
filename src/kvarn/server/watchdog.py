"""Alive means working: an engine with work but no progress fails /health/live, and soon after ends the process.

    pulse thread, every PULSE_S:  look at every engine ──progress──> re-arm the timer
                                            └─none, or no pulse (the GIL is held)──> the timer fires: exit code 1

The timer is faulthandler's: a thread in C that needs no GIL, writes the stacks of all threads to stderr and ends the
process. A process that was stopped (SIGSTOP, a frozen container) longer than the timeout ends when it is continued.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

PULSE_S = 0.25
NOTICE_S = 0.5  # liveness fails this long before the process ends


class Engine(Protocol):
    """What the watchdog wants to know of a loaded model."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def sign_of_life(self) -> object | None:
        """Differs from the last one as long as work advances; None while idle."""


class Watchdog:
    """Looks at the engines that engines() names; start() after they are loaded."""

    def __init__(
        self,
        engines: Callable[[], Iterable[tuple[str, Engine]]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._life_s = timeout_s - PULSE_S  # of a process nobody looks at; the rest is for its last words
        self._clock = clock
        self._seen: dict[str, tuple[object, float]] = {}  # by model: last sign of life, and since when
        self._looked_at = self._news_at = clock()
        self._stuck: str | None = None
        self._arming = threading.Lock()
        self._is_paused = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def stuck_model(self) -> str | None:
        """The model whose engine makes no progress, if there is one."""
        return self._stuck

    def look(self) -> float:
        """Look at every engine; returns the seconds after which the process must end unless it is looked at again."""
        # What is new may be as old as the last look; not older, should the whole process have been stopped.
        now = self._clock()
        self._news_at = max(self._looked_at, now - 2 * PULSE_S)
        self._looked_at = now
        stalled = {name: self._stalled_s(name, engine, now) for name, engine in self._engines()}
        self._seen = {name: self._seen[name] for name in stalled}
        name, stalled_s = max(stalled.items(), key=lambda one: one[1], default=("", 0.0))
        self._stuck = name if stalled_s >= self._life_s - NOTICE_S else None
        return max(self._life_s - stalled_s, 0.0)

    def start(self) -> None:
        """Look from now on, on a thread of its own."""
        self._arm(self.look())
        self._thread = threading.Thread(target=self._pulse, name="kvarn-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End without ending the process."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def pause(self) -> None:
        """The process is about to stand still."""
        with self._arming:
            self._is_paused = True
            faulthandler.cancel_dump_traceback_later()

    def resume(self) -> None:
        """Count from now."""
        self._seen = {}
        self._is_paused = False

    def _stalled_s(self, name: str, engine: Engine, now: float) -> float:
        """Seconds since the last change; 0.0 while idle."""
        is_alive = engine.is_alive
        sign: object = engine.sign_of_life if is_alive else "ended"
        if sign is None:
            self._seen[name] = (None, now)
            return 0.0
        before, since = self._seen.get(name, (None, now))
        if sign != before:
            since = self._news_at
        self._seen[name] = (sign, since)
        return now - since

    def _pulse(self) -> None:
        while not self._stopped.wait(PULSE_S):
            self._arm(self.look())

    def _arm(self, seconds: float) -> None:
        # 0 is refused by faulthandler, and a little later is soon enough.
        with self._arming:
            if not self._is_paused:
                faulthandler.dump_traceback_later(max(seconds, 0.01), exit=True, file=sys.stderr)
