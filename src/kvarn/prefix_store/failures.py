"""What goes wrong with a disk is told once a minute and costs a miss, never an answer."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("kvarn.prefix_cache")
REPEAT_AFTER_S = 60.0


class StoreUnavailable(Exception):
    """The folder cannot be used at all; the message says why and what to do."""


class FailureLog:
    """Counts failures, and logs one of each kind a minute: a full disk fails hundreds of times a second."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._told_at: dict[str, float] = {}

    def tell(self, what: str, error: object) -> None:
        """Something failed: what is its kind, in words for the log."""
        self.num_failures += 1
        now = time.monotonic()
        if now - self._told_at.get(what, -REPEAT_AFTER_S) >= REPEAT_AFTER_S:
            self._told_at[what] = now
            reason = getattr(error, "strerror", None) or error
            log.warning("prefix cache on disk: %s: %s", what, reason)
