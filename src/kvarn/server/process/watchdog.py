"""Alive means working: an engine with work but no progress fails /health/live, and soon after ends the process.

    watchdog thread, every CHECK_INTERVAL_S:  check every engine ──progress──> re-arm the timer
                                     └─none, or no check (the GIL is held)──> the timer fires: exit code 1

The timer is faulthandler's: a thread in C that needs no GIL, writes the stacks of all threads to stderr and ends the
process. A process that was stopped (SIGSTOP, a frozen container) longer than the timeout ends when it is continued.

Liveness goes by the clock. The exit does not, because it cannot be undone: time for which a thread waited for a CPU, or
the check came late, does not count, and half of the timeout must have passed without it. So a server on a machine with
several times as much work as cores reports that it is slow and goes on.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvarn.server.process.cpu_starvation import StarvationMeter

CHECK_INTERVAL_S = 0.25
SUSPECT_S = 1.0  # without progress: from now on CPU starvation is measured
LATE_S = 1.0  # a check so late means that the machine is busy, and the next one may be later
LATE_DECAY = 0.8  # of the last lateness, one check later
MAX_EXTENSION = 12.0
NOTICE_S = 0.5  # liveness fails this long before the process ends


class WatchedEngine(Protocol):
    """What the watchdog reads of a loaded model."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def sign_of_life(self) -> object | None:
        """Differs from the last one as long as work advances; None while idle."""


@dataclass(slots=True)
class _Stall:
    """An engine's last sign of life, since when there was no other, and how much of that is excused."""

    sign: object
    since: float
    excused_s: float = 0.0


class Watchdog:
    """Checks the engines that engines() lists; start() after they are loaded."""

    def __init__(
        self,
        engines: Callable[[], Iterable[tuple[str, WatchedEngine]]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        meter: StarvationMeter | None = None,
    ) -> None:
        self._engines = engines
        self._meter = meter or StarvationMeter()
        self._exit_after_s = timeout_s - CHECK_INTERVAL_S  # without a check; the rest is for writing the stacks
        self._clock = clock
        self._stalls: dict[str, _Stall] = {}  # by model
        self._late_s = 0.0  # of the last checks
        self._checked_at = self._changed_at = clock()
        self._stuck: str | None = None
        self._arming = threading.Lock()
        self._is_paused = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def stuck_model(self) -> str | None:
        """The model whose engine makes no progress, if there is one."""
        return self._stuck

    def check(self) -> float:
        """Check every engine; returns the seconds after which the process must exit unless they are checked again."""
        # What is new may be as old as the last check; not older, should the whole process have been stopped.
        now = self._clock()
        passed_s = now - self._checked_at
        self._changed_at = max(self._checked_at, now - 2 * CHECK_INTERVAL_S)
        self._checked_at = now
        self._stalls = {name: self._stall(name, engine, now) for name, engine in self._engines()}
        self._excuse_starvation(now, passed_s)
        name, longest = min(self._stalls.items(), key=lambda one: one[1].since, default=("", _Stall(None, now)))
        self._stuck = name if now - longest.since >= self._exit_after_s - NOTICE_S else None
        left_s = min((self._left_s(one, now) for one in self._stalls.values()), default=self._exit_after_s)
        return left_s * self._extension(passed_s)

    def start(self) -> None:
        """Check from now on, on a thread of its own."""
        self._checked_at = self._clock()  # loading took its time: that was no late check
        self._arm(self.check())
        self._thread = threading.Thread(target=self._run, name="kvarn-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop checking; the process goes on."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def pause(self) -> None:
        """The process is about to be stopped."""
        with self._arming:
            self._is_paused = True
            faulthandler.cancel_dump_traceback_later()

    def resume(self) -> None:
        """Count from now."""
        self._stalls = {}
        self._checked_at = self._clock()
        self._is_paused = False

    def _stall(self, name: str, engine: WatchedEngine, now: float) -> _Stall:
        """The stall as it was, or a new one since the last change; an idle engine's begins now."""
        sign: object = engine.sign_of_life if engine.is_alive else "ended"
        if sign is None:
            return _Stall(None, now)
        before = self._stalls.get(name)
        if before is not None and sign == before.sign:
            return before
        return _Stall(sign, self._changed_at)

    def _excuse_starvation(self, now: float, passed_s: float) -> None:
        """Excuse the time in which an engine without progress, or the watchdog itself, got no CPU."""
        suspects = [one for one in self._stalls.values() if now - one.since >= SUSPECT_S]
        if not suspects:
            self._meter.reset()
            return
        excused_s = max(self._meter.starved_s(passed_s), passed_s - CHECK_INTERVAL_S, 0.0)
        for one in suspects:
            one.excused_s += excused_s

    def _left_s(self, stall: _Stall, now: float) -> float:
        stalled_s = now - stall.since
        return max(self._exit_after_s - stalled_s, self._exit_after_s / 2 - (stalled_s - stall.excused_s), 0.0)

    def _extension(self, passed_s: float) -> float:
        """How many times as much time the next check may need, going by the last ones."""
        self._late_s = max(passed_s - CHECK_INTERVAL_S, LATE_DECAY * self._late_s)
        return 1.0 if self._late_s < LATE_S else min(1.0 + self._late_s / CHECK_INTERVAL_S, MAX_EXTENSION)

    def _run(self) -> None:
        while not self._stopped.wait(CHECK_INTERVAL_S):
            self._arm(self.check())

    def _arm(self, seconds: float) -> None:
        # 0 is refused by faulthandler, and a little later is soon enough.
        with self._arming:
            if not self._is_paused:
                faulthandler.dump_traceback_later(max(seconds, 0.01), exit=True, file=sys.stderr)
