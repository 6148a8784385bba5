"""What one key has taken: sliding minutes of requests and tokens, running answers, and how such requests usually end.

From the last it estimates when there will be room again. Counts and times only; limits.py decides.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from kvarn.engine.scheduling.rate_limit import ExpectedAnswer
from kvarn.server.access.keys import Principal

WINDOW_S = 60
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0  # bounds of retry-after while running requests hold what is missing
RECENT = 0.25  # weight of the last request in a moving average


@dataclass(slots=True)
class _Bucket:
    """What was charged within one second."""

    second: int
    amount: int


class MinuteWindow:
    """At most limit within any WINDOW_S seconds; one bucket per second, so its size does not depend on the traffic."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.total = 0
        self._buckets: deque[_Bucket] = deque()

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until amount fits; 0.0: now. The amount must not exceed the limit."""
        self.expire(now)
        if self.limit is None or self.total + amount <= self.limit:
            return 0.0
        excess = self.total + amount - self.limit
        for bucket in self._buckets:
            excess -= bucket.amount
            if excess <= 0:
                return _expires_at(bucket) - now
        raise AssertionError("more was asked for than the window could ever hold")

    def charge(self, amount: int, now: float) -> int:
        """Take amount; returns the second to name for correct()."""
        self.expire(now)
        second = math.floor(now)
        if not self._buckets or self._buckets[-1].second != second:
            self._buckets.append(_Bucket(second, 0))
        self._buckets[-1].amount += amount
        self.total += amount
        return second

    def correct(self, second: int, difference: int, now: float) -> None:
        """Change an earlier charge, unless it has left the window already."""
        self.expire(now)
        for bucket in self._buckets:
            if bucket.second == second:
                bucket.amount += difference
                self.total += difference

    def remaining(self, now: float) -> int | None:
        self.expire(now)
        return None if self.limit is None else max(0, self.limit - self.total)

    def reset_s(self, now: float) -> float:
        """Seconds until nothing is charged any more."""
        self.expire(now)
        return _expires_at(self._buckets[-1]) - now if self._buckets else 0.0

    def expire(self, now: float) -> None:
        while self._buckets and _expires_at(self._buckets[0]) <= now:
            self.total -= self._buckets.popleft().amount


def _expires_at(bucket: _Bucket) -> int:
    # One second longer than the window: the last charge of a bucket came up to a second after its start.
    return bucket.second + WINDOW_S + 1


class KeyAccount:
    """What one key has taken."""

    def __init__(self, principal: Principal) -> None:
        tier = principal.tier
        self.tier = tier
        self.requests = MinuteWindow(tier.requests_per_min)
        self.tokens = MinuteWindow(tier.tokens_per_min)
        self.num_running = 0
        self.num_reserved = 0  # tokens of running requests: what they do not use comes back
        self.expected_answer = ExpectedAnswer()
        self._mean_duration_s = 0.0  # of this key's requests, a moving average
        self._used_share = 0.0  # of what they reserved, likewise; until one has ended, all of it may come back
        self._last_retry_at = 0.0  # the latest retry time that was given out

    def next_retry_s(self, num_slots: int, now: float) -> float:
        """Seconds until a slot may be free for one more request; retrying much sooner would only cost the others time.

        Each refused request gets a later time, as often as slots become free: else all would retry at once.
        """
        earliest = now + max(MIN_RETRY_S, self._mean_duration_s / 2)
        after_others = self._last_retry_at + self._mean_duration_s / num_slots
        self._last_retry_at = min(max(earliest, after_others), now + MAX_RETRY_S)
        return self._last_retry_at - now

    def tokens_retry_s(self, num_tokens: int, now: float) -> float:
        """Seconds until so many tokens may be free; 0.0: now.

        The window alone knows what was reserved a minute ago. Running requests give back what they do not use, and
        they end sooner: so much, and then, as the last ones did.
        """
        reserved_s = self.tokens.wait_s(num_tokens, now)
        if reserved_s == 0 or not self.num_reserved:
            return reserved_s
        num_unused = round(self.num_reserved * (1 - self._used_share))
        used_s = self.tokens.wait_s(max(0, num_tokens - num_unused), now)
        return min(reserved_s, max(used_s, self.next_retry_s(max(1, self.num_running), now)))

    def end(self, num_slots: int, took_s: float) -> None:
        """One of the running requests has ended, having computed something."""
        self.num_running -= num_slots
        self._mean_duration_s = _moved(self._mean_duration_s, took_s)

    def observe_use(self, num_reserved: int, num_used: int) -> None:
        """What one of them had reserved, and what it took."""
        self._used_share = _moved(self._used_share, min(1.0, num_used / num_reserved))

    def update_tier(self, principal: Principal) -> None:
        """Take the limits of the key's tier, which may have changed since."""
        tier = self.tier = principal.tier
        self.requests.limit, self.tokens.limit = tier.requests_per_min, tier.tokens_per_min

    def is_idle(self, now: float) -> bool:
        self.requests.expire(now)
        self.tokens.expire(now)
        return self.num_running == 0 and self.requests.total == 0 and self.tokens.total == 0

    def headers(self, now: float) -> dict[str, str]:
        headers = {}
        for name, window in (("requests", self.requests), ("tokens", self.tokens)):
            remaining = window.remaining(now)
            if remaining is None:
                continue
            headers[f"x-ratelimit-limit-{name}"] = str(window.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
            headers[f"x-ratelimit-reset-{name}"] = _duration(window.reset_s(now))
        return headers


def _moved(mean: float, value: float) -> float:
    """A moving average; the first value is the mean."""
    return mean + RECENT * (value - mean) if mean else value


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 1m30s, 2s, 120ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return (f"{minutes}m" if minutes else "") + f"{rest}s"
