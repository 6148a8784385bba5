"""Rate limits of each key: requests and tokens over a sliding minute, and concurrent answers.

    enter() ─> expect(by its bytes) ─> grow(everything it may take) ──runs──> use(what it took) ──last byte──> settle()

Counts by key, on a clock that never goes back; knows no HTTP and no engine. For one thread: the event loop's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvarn.errors import InvalidParameter, RateLimited
from kvarn.server.access.account import KeyAccount
from kvarn.server.access.keys import Principal

OnRefused = Callable[[str, str], None]
MIN_ACCOUNTS = 1024  # from here on, idle ones are dropped now and then


class Reservation:
    """What one request may take, until it is settled: a slot from the start, tokens once they are known."""

    def __init__(self, limits: RateLimits, account: KeyAccount) -> None:
        now = limits.now()
        self.num_tokens = 0  # that it may take; those that it took, once it is settled
        self.num_slots = 1
        self._limits = limits
        self._account = account
        self._is_open = True
        self._is_used = False  # what it took is known, and no longer what it may take
        self._is_counted = True  # among the requests of the minute
        self._has_grown = False
        self._began = now
        account.num_running += 1
        self._second = account.requests.charge(1, now)
        self._charges: list[tuple[int, int]] = []  # second, tokens
        self._num_open_ended = 0  # answers without max_tokens
        self._num_known = 0  # tokens without theirs
        self._num_expected = 0  # tokens that grow() will ask for, taken already
        self._num_spent = 0  # tokens that its bytes have cost, whatever becomes of it
        self._num_used = 0

    @property
    def is_in_vain(self) -> bool:
        """Whether nothing was computed for it: it was refused."""
        return self._num_used == 0 if self._is_used else not self._has_grown

    @property
    def headers(self) -> dict[str, str]:
        """x-ratelimit-{limit,remaining,reset}-{requests,tokens} as they are now; none for what is unlimited."""
        return self._account.headers(self._limits.now())

    def expect(self, num_tokens: int, num_spent: int) -> None:
        """Take what it costs at least, by its bytes, before anything is made of them; a part of what grow() takes.

        num_spent: what looking at them costs, also if the request is refused afterwards.
        """
        if not num_tokens:
            return
        self._limits.require(self._account, self, num_tokens, 0)
        self._charge(num_tokens, self._limits.now())
        self._num_expected += num_tokens
        self._num_spent += min(num_spent, num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Something was done for it that no answer will pay for."""
        self._num_spent += num_tokens

    def grow(self, num_tokens: int, *, num_answers: int = 1, open_ended: Sequence[int] = ()) -> None:
        """Take tokens, and a slot for each answer, or raise when to retry; what it has stays its own.

        open_ended: the most tokens of each answer without max_tokens; as many are taken as are to be expected.
        """
        account = self._account
        num_slots = max(num_answers - self.num_slots, 0)
        self._num_known += num_tokens
        self._num_open_ended += len(open_ended)
        num_tokens += sum(map(account.expected_answer.within, open_ended))
        num_tokens -= (covered := min(self._num_expected, num_tokens))
        self._limits.require(account, self, num_tokens, num_slots)
        self._num_expected -= covered
        self._has_grown = True
        account.num_running += num_slots
        self.num_slots += num_slots
        self._charge(num_tokens, self._limits.now())

    def withdraw(self) -> None:
        """The request was refused before anything was computed, so it is no request of the minute."""
        self.settle()
        if self._is_counted:
            self._is_counted = False
            self._account.requests.correct(self._second, -1, self._limits.now())

    def use(self, num_tokens: int) -> None:
        """Count what it took instead of what it might have taken; its slots stay taken. Only the first call counts."""
        if self._is_used:
            return
        self._is_used = True
        self._num_used = max(0, num_tokens)
        now = self._limits.now()
        self._observe_use()
        used_tokens = max(self._num_used, self._num_spent)
        surplus = self.num_tokens - used_tokens
        if surplus < 0:  # it took more than it reserved: the excess counts from now on
            self._account.tokens.charge(-surplus, now)
        for second, amount in reversed(self._charges):
            given_back = max(0, min(surplus, amount))
            self._account.tokens.correct(second, -given_back, now)
            surplus -= given_back
        self.num_tokens = used_tokens

    def settle(self, used_tokens: int = 0) -> None:
        """The request ended: its slots are free again, and so is what it did not use. Only the first call counts."""
        if not self._is_open:
            return
        self._is_open = False
        self.use(used_tokens)
        if self._num_used:
            self._account.end(self.num_slots, self._limits.now() - self._began)
        else:
            self._account.num_running -= self.num_slots

    def _observe_use(self) -> None:
        account = self._account
        account.num_reserved -= self.num_tokens
        if self._num_used and self.num_tokens:
            account.observe_use(self.num_tokens, self._num_used)
        if self._num_used and self._num_open_ended:
            account.expected_answer.observe((self._num_used - self._num_known) / self._num_open_ended)

    def _charge(self, num_tokens: int, now: float) -> None:
        self._charges.append((self._account.tokens.charge(num_tokens, now), num_tokens))
        self._account.num_reserved += num_tokens
        self.num_tokens += num_tokens


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

    def enter(self, principal: Principal) -> Reservation:
        """Count one more request of a key, whatever its size, or raise when to retry."""
        account = self._account(principal, self.now())
        self._require_slots(account, 1)
        if (wait_s := account.requests.wait_s(1, self.now())) > 0:
            raise self._refusal(account, "requests", f"{account.requests.limit:,} requests a minute", wait_s)
        return Reservation(self, account)

    def require(self, account: KeyAccount, taken: Reservation, num_tokens: int, num_slots: int) -> None:
        """Raise unless a request that has taken something may take this much more."""
        self._require_possible(account, taken.num_tokens + num_tokens, taken.num_slots + num_slots)
        self._require_slots(account, num_slots)
        if (wait_s := account.tokens_retry_s(num_tokens, self.now())) > 0:
            raise self._refusal(account, "tokens", f"{account.tokens.limit:,} tokens a minute", wait_s)

    def headers(self, principal: Principal) -> dict[str, str]:
        """What is left to a key, without taking anything."""
        now = self.now()
        return self._account(principal, now).headers(now)

    def _require_possible(self, account: KeyAccount, num_tokens: int, num_slots: int) -> None:
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
        limit = account.tier.concurrency
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

    def _account(self, principal: Principal, now: float) -> KeyAccount:
        account = self._accounts.get(principal.key_id)
        if account is None:
            if len(self._accounts) >= self._prune_at:
                self._prune(now)
            account = self._accounts[principal.key_id] = KeyAccount(principal)
        elif account.tier != principal.tier:
            account.update_tier(principal)
        return account

    def _prune(self, now: float) -> None:
        idle = [key_id for key_id, account in self._accounts.items() if account.is_idle(now)]
        for key_id in idle:
            del self._accounts[key_id]
        self._prune_at = max(MIN_ACCOUNTS, 2 * len(self._accounts))  # so that looking through them costs O(1) each
