"""Rate limits of each key: requests and tokens over a sliding minute, and concurrent answers.

    enter() ──body is read──> grow(everything it may take) ──runs──> settle(what it took)      the rest is free again

Counts by key, on a clock that never goes back; knows no HTTP and no engine. For one thread: the event loop's.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvarn.errors import InvalidParameter, RateLimited
from kvarn.server.access.keys import Principal
from kvarn.server.api.schema import InvalidField

WINDOW_S = 60
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0  # bounds of retry-after while all slots are taken
OnRefused = Callable[[str, str], None]
MIN_ACCOUNTS = 1024  # from here on, idle ones are dropped now and then


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


class _Account:
    """What one key has taken."""

    def __init__(self, principal: Principal) -> None:
        tier = principal.tier
        self.tier = tier
        self.requests = MinuteWindow(tier.requests_per_min)
        self.tokens = MinuteWindow(tier.tokens_per_min)
        self.num_running = 0
        self._mean_duration_s = 0.0  # of this key's requests, a moving average
        self._last_retry_at = 0.0  # the latest retry time that was given out

    def next_retry_s(self, num_slots: int, now: float) -> float:
        """Seconds until a slot may be free for one more request; retrying much sooner would only cost the others time.

        Each refused request gets a later time, as often as slots become free: else all would retry at once.
        """
        earliest = now + max(MIN_RETRY_S, self._mean_duration_s / 2)
        after_others = self._last_retry_at + self._mean_duration_s / num_slots
        self._last_retry_at = min(max(earliest, after_others), now + MAX_RETRY_S)
        return self._last_retry_at - now

    def end(self, num_slots: int, took_s: float | None) -> None:
        """One of the running requests has ended; took_s: None for one that computed nothing."""
        self.num_running -= num_slots
        if took_s is not None:
            self._mean_duration_s += (took_s - self._mean_duration_s) / 4

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


class Reservation:
    """What one request may take, until it is settled: a slot from the start, tokens once they are known."""

    def __init__(self, limits: RateLimits, account: _Account) -> None:
        now = limits.now()
        self.num_tokens = 0  # that it may take; those that it took, once it is settled
        self.num_slots = 1
        self._limits = limits
        self._account = account
        self._is_open = True
        self._is_counted = True  # among the requests of the minute
        self._began = now
        account.num_running += 1
        self._second = account.requests.charge(1, now)
        self._charges: list[tuple[int, int]] = []  # second, tokens

    @property
    def headers(self) -> dict[str, str]:
        """x-ratelimit-{limit,remaining,reset}-{requests,tokens} as they are now; none for what is unlimited."""
        return self._account.headers(self._limits.now())

    def grow(self, num_tokens: int, *, num_answers: int = 1) -> None:
        """Take tokens, and a slot for each answer, or raise when to retry; what it has stays its own."""
        account = self._account
        num_slots = max(num_answers - self.num_slots, 0)
        self._limits.require(account, self, num_tokens, num_slots)
        account.num_running += num_slots
        self.num_slots += num_slots
        self._charge(num_tokens, self._limits.now())

    def withdraw(self) -> None:
        """The request was refused before anything was computed, so it counts for nothing."""
        self.settle(0)
        if self._is_counted:
            self._is_counted = False
            self._account.requests.correct(self._second, -1, self._limits.now())

    def settle(self, used_tokens: int) -> None:
        """The request ended: count what it took instead of what it might have taken. Only the first call counts."""
        if not self._is_open:
            return
        self._is_open = False
        now = self._limits.now()
        self._account.end(self.num_slots, now - self._began if used_tokens > 0 else None)
        surplus = self.num_tokens - max(0, used_tokens)
        if surplus < 0:  # it took more than it reserved: the excess counts from now on
            self._account.tokens.charge(-surplus, now)
        for second, amount in reversed(self._charges):
            given_back = max(0, min(surplus, amount))
            self._account.tokens.correct(second, -given_back, now)
            surplus -= given_back
        self.num_tokens = max(0, used_tokens)

    def _charge(self, num_tokens: int, now: float) -> None:
        self._charges.append((self._account.tokens.charge(num_tokens, now), num_tokens))
        self.num_tokens += num_tokens


class RateLimits:
    """The accounts of all keys with requests in the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, on_refused: OnRefused | None = None) -> None:
        """on_refused: called with the tier and the reason of each RateLimited."""
        self._clock = clock
        self._on_refused = on_refused
        self._last = -math.inf
        self._accounts: dict[str, _Account] = {}
        self._prune_at = MIN_ACCOUNTS

    @property
    def num_accounts(self) -> int:
        return len(self._accounts)

    def now(self) -> float:
        """The clock, except that it never goes back."""
        self._last = max(self._last, self._clock())
        return self._last

    def enter(self, principal: Principal) -> Reservation:
        """Count one more request of a key, whatever its size, or raise when to retry."""
        account = self._account(principal, self.now())
        self._require_slots(account, 1)
        self._require(account, account.requests, 1, "requests")
        return Reservation(self, account)

    def require(self, account: _Account, taken: Reservation, num_tokens: int, num_slots: int) -> None:
        """Raise unless a request that has taken something may take this much more."""
        self._require_possible(account, taken.num_tokens + num_tokens, taken.num_slots + num_slots)
        self._require_slots(account, num_slots)
        self._require(account, account.tokens, num_tokens, "tokens")

    def headers(self, principal: Principal) -> dict[str, str]:
        """What is left to a key, without taking anything."""
        now = self.now()
        return self._account(principal, now).headers(now)

    def _require_possible(self, account: _Account, num_tokens: int, num_slots: int) -> None:
        tier = account.tier
        if tier.concurrency is not None and num_slots > tier.concurrency:
            raise InvalidParameter(
                f"the request wants {num_slots:,} answers at once, tier {tier.name!r} allows {tier.concurrency:,}; "
                "send fewer prompts or lower n"
            )
        if tier.tokens_per_min is not None and num_tokens > tier.tokens_per_min:
            raise InvalidField(
                f"the request may take {num_tokens:,} tokens, tier {tier.name!r} allows {tier.tokens_per_min:,} a "
                "minute; shorten the prompt or lower max_tokens, n or k",
                None,
                mentions=("max_tokens",),
            )

    def _require_slots(self, account: _Account, number: int) -> None:
        limit = account.tier.concurrency
        if limit is not None and number and account.num_running + number > limit:
            retry_s = account.next_retry_s(limit, self.now())
            raise self._refusal(account, "concurrency", f"{limit:,} answers at once", retry_s)

    def _require(self, account: _Account, window: MinuteWindow, amount: int, what: str) -> None:
        wait_s = window.wait_s(amount, self.now())
        if wait_s > 0:
            raise self._refusal(account, what, f"{window.limit:,} {what} a minute", wait_s)

    def _refusal(self, account: _Account, reason: str, limit: str, wait_s: float) -> RateLimited:
        if self._on_refused is not None:
            self._on_refused(account.tier.name, reason)
        return RateLimited(
            f"tier {account.tier.name!r} allows {limit}, and this one would be more; try again in {wait_s:.1f} s",
            retry_after_s=wait_s,
            reason=reason,
            headers=account.headers(self.now()),
        )

    def _account(self, principal: Principal, now: float) -> _Account:
        account = self._accounts.get(principal.key_id)
        if account is None:
            if len(self._accounts) >= self._prune_at:
                self._prune(now)
            account = self._accounts[principal.key_id] = _Account(principal)
        elif account.tier != principal.tier:
            account.update_tier(principal)
        return account

    def _prune(self, now: float) -> None:
        idle = [key_id for key_id, account in self._accounts.items() if account.is_idle(now)]
        for key_id in idle:
            del self._accounts[key_id]
        self._prune_at = max(MIN_ACCOUNTS, 2 * len(self._accounts))  # so that looking through them costs O(1) each


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 1m30s, 2s, 120ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return (f"{minutes}m" if minutes else "") + f"{rest}s"
