"""Rate limits of each key: requests and tokens over a sliding minute, and concurrent answers. The rules, once.

Counts by key, in this process, on a clock that never goes back; knows no HTTP and no engine. For one thread: the event
loop's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from kvarn.errors import InvalidParameter, RateLimited
from kvarn.server.access.account import KeyAccount
from kvarn.server.access.keys import Principal
from kvarn.server.access.reservation import Reservation, Wanted

OnRefused = Callable[[str, str], None]
MIN_ACCOUNTS = 1024  # from here on, idle ones are dropped now and then


class RateLimits:
    """The accounts of all keys with requests in the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, on_refused: OnRefused | None = None) -> None:
        """on_refused: called with the tier and the reason of each RateLimited."""
        self._clock = clock
        self._on_refused = on_refused
        self._last = -math.inf
        self._accounts: dict[str, KeyAccount] = {}
        self._prune_at = MIN_ACCOUNTS

    @property
    def num_accounts(self) -> int:
        return len(self._accounts)

    def now(self) -> float:
        """The clock, except that it never goes back."""
        self._last = max(self._last, self._clock())
        return self._last

    async def start(self) -> None:
        """Nothing is needed."""

    async def close(self) -> None:
        """Nothing is held."""

    async def enter(self, principal: Principal) -> Reservation:
        """Count one more request of a key, whatever its size, or raise when to retry."""
        account = self.account(principal)
        return Reservation(self, account, await self.take(account, None, Wanted(num_requests=1, num_slots=1)))

    async def take(self, account: KeyAccount, taken: Reservation | None, wanted: Wanted) -> float:
        """Raise unless a request that has taken something may take this much more."""
        self.require(account, taken, wanted)
        return self.now()

    def changed(self, account: KeyAccount, seconds: Iterable[int]) -> None:
        """The accounts are all there is."""

    def require(self, account: KeyAccount, taken: Reservation | None, wanted: Wanted) -> None:
        """Raise unless a request that has taken something may take this much more."""
        if taken is not None:
            self.require_possible(account, taken.num_tokens + wanted.num_tokens, taken.num_slots + wanted.num_slots)
        self._require_slots(account, wanted.num_slots)
        if wanted.num_requests and (wait_s := account.requests.wait_s(wanted.num_requests, self.now())) > 0:
            raise self._refusal(account, "requests", f"{account.requests.limit:,} requests a minute", wait_s)
        if (wait_s := account.tokens_retry_s(wanted.num_tokens, self.now())) > 0:
            raise self._refusal(account, "tokens", f"{account.tokens.limit:,} tokens a minute", wait_s)

    def headers(self, principal: Principal) -> dict[str, str]:
        """What is left to a key, without taking anything."""
        return self.headers_of(self.account(principal))

    def headers_of(self, account: KeyAccount) -> dict[str, str]:
        """The same of an account."""
        return account.headers(self.now())

    def require_possible(self, account: KeyAccount, num_tokens: int, num_slots: int) -> None:
        """Raise unless the tier may ever allow one request so much."""
        tier = account.tier
        if tier.concurrency is not None and num_slots > tier.concurrency:
            raise InvalidParameter(
                f"the request wants {num_slots:,} answers at once, tier {tier.name!r} allows {tier.concurrency:,}; "
                "send fewer prompts or lower n",
                field="n",
            )
        if tier.tokens_per_min is not None and num_tokens > tier.tokens_per_min:
            raise InvalidParameter(
                f"the request may take {num_tokens:,} tokens, tier {tier.name!r} allows {tier.tokens_per_min:,} a "
                "minute; shorten the prompt or lower max_tokens, n or k",
                field="max_tokens",
            )

    def _require_slots(self, account: KeyAccount, number: int) -> None:
        limit = account.concurrency
        if limit is not None and number and account.num_running + number > limit:
            retry_s = account.next_retry_s(limit, self.now())
            raise self._refusal(account, "concurrency", f"{limit:,} answers at once", retry_s)

    def _refusal(self, account: KeyAccount, reason: str, limit: str, wait_s: float) -> RateLimited:
        if self._on_refused is not None:
            self._on_refused(account.tier.name, reason)
        return RateLimited(
            f"tier {account.tier.name!r} allows {limit}, and this one would be more; try again in {wait_s:.1f} s",
            retry_after_s=wait_s,
            reason=reason,
            headers=account.headers(self.now()),
        )

    def account(self, principal: Principal) -> KeyAccount:
        """The account of a key, with the limits of its tier."""
        account = self._accounts.get(principal.key_id)
        if account is None:
            if len(self._accounts) >= self._prune_at:
                self._prune(self.now())
            account = self._accounts[principal.key_id] = KeyAccount(principal)
        elif account.tier != principal.tier:
            account.update_tier(principal)
        return account

    def _prune(self, now: float) -> None:
        idle = [key_id for key_id, account in self._accounts.items() if account.is_idle(now)]
        for key_id in idle:
            del self._accounts[key_id]
        self._prune_at = max(MIN_ACCOUNTS, 2 * len(self._accounts))  # so that looking through them costs O(1) each
