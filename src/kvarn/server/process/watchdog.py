"""Alive means working: an engine with work but no progress fails /health/live, and soon after ends the process.

    pulse thread, every PULSE_S:  look at every engine ──progress──> re-arm the timer
                                            └─none, or no pulse (the GIL is held)──> the timer fires: exit code 1

The timer is faulthandler's: a thread in C that needs no GIL, writes the stacks of all threads to stderr and ends the
process. A process that was stopped (SIGSTOP, a frozen container) longer than the timeout ends when it is continued.

Liveness goes by the clock. The end does not, because it cannot be taken back: time for which a thread waited for a CPU,
or the pulse came late, is excused, and half of the timeout must be left without it. So a server on a machine with
several times as much work as cores says that it is slow and goes on.
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

PULSE_S = 0.25
SUSPECT_S = 1.0  # without progress: from now on it is measured whether the machine is to blame
LATE_S = 1.0  # a pulse so late means that the machine is busy, and the next one may be later
LATE_MEMORY = 0.8  # of the last lateness, one pulse later
MAX_STRETCH = 12.0
NOTICE_S = 0.5  # liveness fails this long before the process ends


class WatchedEngine(Protocol):
    """What the watchdog wants to know of a loaded model."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def sign_of_life(self) -> object | None:
        """Differs from the last one as long as work advances; None while idle."""


@dataclass(slots=True)
class _Stall:
    """An engine's last sign of life, since when there was no other, and how much of that was not its fault."""

    sign: object
    since: float
    excused_s: float = 0.0


class Watchdog:
    """Looks at the engines that engines() names; start() after they are loaded."""

    def __init__(
        self,
        engines: Callable[[], Iterable[tuple[str, WatchedEngine]]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        meter: StarvationMeter | None = None,
    ) -> None:
        self._engines = engines
        self._meter = meter or StarvationMeter()
        self._life_s = timeout_s - PULSE_S  # of a process nobody looks at; the rest is for its last words
        self._clock = clock
        self._stalls: dict[str, _Stall] = {}  # by model
        self._late_s = 0.0  # of the last pulses
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
        passed_s = now - self._looked_at
        self._news_at = max(self._looked_at, now - 2 * PULSE_S)
        self._looked_at = now
        self._stalls = {name: self._stall(name, engine, now) for name, engine in self._engines()}
        self._excuse(now, passed_s)
        name, longest = min(self._stalls.items(), key=lambda one: one[1].since, default=("", _Stall(None, now)))
        self._stuck = name if now - longest.since >= self._life_s - NOTICE_S else None
        left_s = min((self._left_s(one, now) for one in self._stalls.values()), default=self._life_s)
        return left_s * self._stretch(passed_s)

    def start(self) -> None:
        """Look from now on, on a thread of its own."""
        self._looked_at = self._clock()  # loading took its time: that was no late look
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
        self._stalls = {}
        self._looked_at = self._clock()
        self._is_paused = False

    def _stall(self, name: str, engine: WatchedEngine, now: float) -> _Stall:
        """The stall as it was, or a new one since the last change; an idle engine's begins now."""
        sign: object = engine.sign_of_life if engine.is_alive else "ended"
        if sign is None:
            return _Stall(None, now)
        before = self._stalls.get(name)
        if before is not None and sign == before.sign:
            return before
        return _Stall(sign, self._news_at)

    def _excuse(self, now: float, passed_s: float) -> None:
        """Take note of time in which an engine without progress, or we ourselves, did not get to run."""
        suspects = [one for one in self._stalls.values() if now - one.since >= SUSPECT_S]
        if not suspects:
            self._meter.forget()
            return
        excused_s = max(self._meter.starved_s(passed_s), passed_s - PULSE_S, 0.0)
        for one in suspects:
            one.excused_s += excused_s

    def _left_s(self, stall: _Stall, now: float) -> float:
        stalled_s = now - stall.since
        return max(self._life_s - stalled_s, self._life_s / 2 - (stalled_s - stall.excused_s), 0.0)

    def _stretch(self, passed_s: float) -> float:
        """How many times as much time the next look may need, going by the last ones."""
        self._late_s = max(passed_s - PULSE_S, LATE_MEMORY * self._late_s)
        return 1.0 if self._late_s < LATE_S else min(1.0 + self._late_s / PULSE_S, MAX_STRETCH)

    def _pulse(self) -> None:
        while not self._stopped.wait(PULSE_S):
            self._arm(self.look())

    def _arm(self, seconds: float) -> None:
        # 0 is refused by faulthandler, and a little later is soon enough.
        with self._arming:
            if not self._is_paused:
                faulthandler.dump_traceback_later(max(seconds, 0.01), exit=True, file=sys.stderr)
