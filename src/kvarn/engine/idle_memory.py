"""Memory of an idle engine goes back to the system: pages of free blocks soon, those of cached prefixes much later."""

from __future__ import annotations

import logging
import time

from kvarn.engine.engine import Engine

log = logging.getLogger("kvarn.engine")

COMPACT_AFTER_S = 2.0  # idle this long: pages of free blocks ...
FORGET_AFTER_S = 600.0  # ... and those of cached prefixes too


class IdleMemory:
    """What is to be returned and when; for the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._planned: list[tuple[float, bool]] = []  # (when, whether cached prefixes go too), soonest first

    @property
    def is_planned(self) -> bool:
        return bool(self._planned)

    def plan(self, idle_since: float) -> None:
        """The engine has become idle."""
        self._planned = [(idle_since + COMPACT_AFTER_S, False), (idle_since + FORGET_AFTER_S, True)]

    def next_in_s(self) -> float | None:
        """Seconds until something is to be returned; None: nothing is."""
        return max(0.0, self._planned[0][0] - time.monotonic()) if self._planned else None

    def return_next(self) -> None:
        """Return what is due first."""
        _, drops_cached = self._planned.pop(0)
        try:
            for group in range(len(self._engine.kv.groups)):
                block_ids = self._engine.kv.reclaim(drop_cached=drops_cached, group=group)
                self._engine.backend.return_kv(block_ids, group)
            if self._engine.kv.states is not None:  # snapshots have gone with their blocks
                self._engine.backend.return_states(self._engine.kv.states.reclaim())
        except Exception:
            log.exception("idle memory was not returned")
