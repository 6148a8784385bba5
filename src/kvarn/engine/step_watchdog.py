"""Looks now and then whether the step in flight has been running for too long. Knows times; knows no step."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from kvarn.errors import BackendError

WATCH_EVERY_S = 10.0  # or a quarter of the step timeout, where that is shorter


class WatchedThread(Protocol):
    """kvarn.engine.thread.EngineThread, as the watchdog needs it."""

    step_timeout_s: float

    @property
    def busy_s(self) -> float: ...

    def report_stuck(self) -> None: ...


def stuck_error(busy_s: float, step_timeout_s: float) -> BackendError:
    """What callers are told of a step that does not end."""
    return BackendError(
        f"a step has been running for {busy_s:.1f} s, longer than step_timeout_s={step_timeout_s:g}; "
        "the engine serves again when it ends"
    )


class StepWatchdog(threading.Thread):
    """A daemon thread beside the engine's; ends when stopped is set."""

    def __init__(self, engine_thread: WatchedThread, stopped: threading.Event) -> None:
        super().__init__(name="kvarn-watchdog", daemon=True)
        self._engine_thread = engine_thread
        self._stopped_event = stopped

    def run(self) -> None:
        period = min(WATCH_EVERY_S, self._engine_thread.step_timeout_s / 4)
        looked_at = time.monotonic()
        while not self._stopped_event.wait(period):
            was_asleep = time.monotonic() - looked_at > 2 * period  # the whole process was stopped: look again later
            looked_at = time.monotonic()
            if self._engine_thread.busy_s > self._engine_thread.step_timeout_s and not was_asleep:
                self._engine_thread.report_stuck()
