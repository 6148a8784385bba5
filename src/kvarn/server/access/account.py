"""What one key has taken: sliding minutes of requests and tokens, running answers, and how such requests usually end.

From the last it estimates when there will be room again. Counts and times only; limits.py decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

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
        """Seconds until amount fits; 0.0: now. One beyond the limit, which may be a share of the tier's: a window."""
        self.expire(now)
        if self.limit is None or self.total + amount <= self.limit:
            return 0.0
        if amount > self.limit:
            return float(WINDOW_S)
        excess = self.total + amount - self.limit
        for bucket in self._buckets:
            excess -= bucket.amount
            if excess <= 0:
                return _expires_at(bucket) - now
        raise AssertionError("more was asked for than the window could ever hold")

    def charge(self, amount: int, now: float) -> int:
        """Take amount; returns the second to name for correct(). Now may be a little earlier than the last charge's."""
        self.expire(now)
        second = math.floor(now)
        index = len(self._buckets)
        while index and self._buckets[index - 1].second > second:
            index -= 1
        if not index or self._buckets[index - 1].second != second:
            self._buckets.insert(index, _Bucket(second, 0))
            index += 1
        self._buckets[index - 1].amount += amount
        self.total += amount
        return second

    def charged(self) -> dict[int, int]:
        """What is charged, by second."""
        return {bucket.second: bucket.amount for bucket in self._buckets}

    def load(self, charged: Mapping[int, int]) -> None:
        """Count these charges, by second, instead of what was counted."""
        self._buckets = deque(_Bucket(second, amount) for second, amount in sorted(charged.items()))
        self.total = sum(charged.values())

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


@dataclass(slots=True)
class AnswerPace:
    """How a key's requests usually end."""

    mean_duration_s: float = 0.0  # a moving average
    used_share: float = 0.0  # of what they reserved, likewise; until one has ended, all of it may come back
    last_retry_at: float = 0.0  # the latest retry time that was given out
    expected_answer: ExpectedAnswer = field(default_factory=ExpectedAnswer)


class KeyAccount:
    """What one key has taken."""

    def __init__(self, principal: Principal, pace: AnswerPace | None = None) -> None:
        """pace: that of another account of the same key."""
        tier = principal.tier
        self.key_id = principal.key_id
        self.tier = tier
        self.requests = MinuteWindow(tier.requests_per_min)
        self.tokens = MinuteWindow(tier.tokens_per_min)
        self.concurrency = tier.concurrency
        self.num_running = 0
        self.num_reserved = 0  # tokens of running requests: what they do not use comes back
        self.pace = AnswerPace() if pace is None else pace

    def next_retry_s(self, num_slots: int, now: float) -> float:
        """Seconds until a slot may be free for one more request; retrying much sooner would only cost the others time.

        Each refused request gets a later time, as often as slots become free: else all would retry at once.
        """
        pace = self.pace
        earliest = now + max(MIN_RETRY_S, pace.mean_duration_s / 2)
        after_others = pace.last_retry_at + pace.mean_duration_s / max(1, num_slots)
        pace.last_retry_at = min(max(earliest, after_others), now + MAX_RETRY_S)
        return pace.last_retry_at - now

    def tokens_retry_s(self, num_tokens: int, now: float) -> float:
        """Seconds until so many tokens may be free; 0.0: now.

        The window alone knows what was reserved a minute ago. Running requests give back what they do not use, and
        they end sooner: so much, and then, as the last ones did.
        """
        reserved_s = self.tokens.wait_s(num_tokens, now)
        if reserved_s == 0 or not self.num_reserved:
            return reserved_s
        num_unused = round(self.num_reserved * (1 - self.pace.used_share))
        used_s = self.tokens.wait_s(max(0, num_tokens - num_unused), now)
        return min(reserved_s, max(used_s, self.next_retry_s(max(1, self.num_running), now)))

    def end(self, num_slots: int, took_s: float) -> None:
        """One of the running requests has ended, having computed something."""
        self.num_running -= num_slots
        self.pace.mean_duration_s = _moved(self.pace.mean_duration_s, took_s)

    def observe_use(self, num_reserved: int, num_used: int) -> None:
        """What one of them had reserved, and what it took."""
        self.pace.used_share = _moved(self.pace.used_share, min(1.0, num_used / num_reserved))

    def update_tier(self, principal: Principal) -> None:
        """Take the limits of the key's tier, which may have changed since."""
        tier = self.tier = principal.tier
        self.limit(tier.requests_per_min, tier.tokens_per_min, tier.concurrency)

    def limit(self, requests: int | None, tokens: int | None, concurrency: int | None) -> None:
        """Count against these limits, which may be a share of the tier's."""
        self.requests.limit, self.tokens.limit, self.concurrency = requests, tokens, concurrency

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
