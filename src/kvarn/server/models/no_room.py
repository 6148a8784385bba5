"""The refusal of a model that has no room beside those in use, and when to ask again. Knows bytes and seconds only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvarn.errors import CapacityError

RETRY_AFTER_S = 5.0  # about one answer's time, where nothing tells how long
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class NoRoomForModel(CapacityError):
    """Other models are in use, and there is no memory for one more."""

    def __init__(self, message: str, missing_bytes: int, in_use: Mapping[str, int]) -> None:
        """in_use: the bytes of each model that can be unloaded once its requests have ended."""
        super().__init__(message, retry_after_s=RETRY_AFTER_S)
        self._missing_bytes = missing_bytes
        self._in_use = in_use

    def retry_after(self, left_s: Callable[[str], float | None]) -> None:
        """Retry when enough of the models will be idle; left_s: how long the requests of one will still run."""
        times = sorted((_bounded(left_s(model_id)), num_bytes) for model_id, num_bytes in self._in_use.items())
        num_missing = self._missing_bytes
        for seconds, num_bytes in times:
            self.retry_after_s = seconds
            num_missing -= num_bytes
            if num_missing <= 0:
                return


def _bounded(left_s: float | None) -> float:
    """None: what runs does not tell how long."""
    return RETRY_AFTER_S if left_s is None else min(max(left_s, MIN_RETRY_S), MAX_RETRY_S)
