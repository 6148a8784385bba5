"""How often drafts are right, learned from the answers themselves, also from drafts that no row was spent on.

A rate is kept for each source and each length of match: two tokens in common say less than twenty.
"""

from __future__ import annotations

from collections.abc import Mapping

MEMORY = 0.97  # what an older observation counts for when a new one comes: some thirty of them matter
REQUEST_WEIGHT = 4.0  # observations of the request itself that count as much as all that is known of its tenant
MAX_BUCKET = 9
PRIORS: Mapping[str, float] = {"grammar": 0.98, "prediction": 0.85, "draft": 0.6}
PRIOR = 0.5  # of the others
PRIOR_WEIGHT = 2.0

Key = tuple[str, int]  # source and bucket


class AcceptanceRates:
    """Rates of one tenant, or of one request on top of those of its tenant."""

    def __init__(self, beneath: AcceptanceRates | None = None) -> None:
        self._beneath = beneath
        self._counts: dict[Key, tuple[float, float]] = {}  # right, all

    def rate(self, source: str, match: int) -> float:
        """The chance that a token is right which so many equal ones stand before."""
        return self._rate((source, bucket(match)))

    def observe(self, source: str, match: int, is_right: bool) -> None:
        key = (source, bucket(match))
        right, total = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = MEMORY * right + is_right, MEMORY * total + 1.0
        if self._beneath is not None:
            self._beneath.observe(source, match, is_right)

    def _rate(self, key: Key) -> float:
        right, total = self._counts.get(key, (0.0, 0.0))
        if self._beneath is not None:
            return (right + REQUEST_WEIGHT * self._beneath._rate(key)) / (total + REQUEST_WEIGHT)
        return (right + PRIOR_WEIGHT * PRIORS.get(key[0], PRIOR)) / (total + PRIOR_WEIGHT)


def bucket(match: int) -> int:
    """Each length on its own up to 4, then 5-7, 8-15, 16-31, 32-63, more."""
    return match if match <= 4 else min(2 + match.bit_length(), MAX_BUCKET)
