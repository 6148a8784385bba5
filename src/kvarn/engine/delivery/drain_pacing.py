"""How often an event loop takes what an engine has for it: at once, unless that would keep it busy.

    step   |   |   |   |   |   |   |   |
    drain  ^   ^   ^   ^   ^   ^   ^   ^     work is little beside a step: every token as it comes
    drain  ^               ^                 it is not: several tokens of a stream together cost as much as one

Pure: seconds in, a time out.
"""

from __future__ import annotations

BEHIND_SHARE = 0.25  # of a step: more work for its tokens than this, and the loop counts as behind
DRAIN_SHARE = 0.08  # of the time that a loop which is behind spends on draining
MAX_DELAY_S = 0.025  # that a token waits for at most because of it
# Requests that come go first, as all answers end sooner then (docs/LOG.md): this much longer for each of them.
ARRIVAL_S = 0.001
MAX_DELAY_ARRIVALS_S = 0.1
OLD_SHARE = 0.5  # of the average that the last drain does not change


class DrainPacing:
    """Tells when the next drain may begin, from what the last ones took."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._began_at = 0.0
        self._num_steps = 0

    def next_at(self, began_at: float, work_s: float, num_steps: int, num_arrivals: int = 0) -> float:
        """When to drain next after a drain that took work_s of CPU time; num_steps: of the engine, in all.

        num_arrivals: requests that have come since the drain before.
        """
        self._work_s = OLD_SHARE * self._work_s + (1 - OLD_SHARE) * work_s
        step_s = (began_at - self._began_at) / max(num_steps - self._num_steps, 1)
        self._began_at, self._num_steps = began_at, num_steps
        if self._work_s <= BEHIND_SHARE * step_s:
            return began_at
        max_delay_s = min(MAX_DELAY_S + ARRIVAL_S * num_arrivals, MAX_DELAY_ARRIVALS_S)
        return began_at + min(max_delay_s, self._work_s / DRAIN_SHARE)
