"""What one request takes of its key's limits: a slot from the start, tokens once they are known, until it is settled.

    enter() ─> expect(by its bytes) ─> grow(everything it may take) ──runs──> use(what it took) ──last byte──> settle()

Counts; whether there is room is for KeyLimits to say. For one thread: the event loop's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvarn.server.access.account import KeyAccount
from kvarn.server.access.keys import Principal


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for at once."""

    num_requests: int = 0
    num_tokens: int = 0
    num_slots: int = 0


class KeyLimits(Protocol):
    """Who counts what the keys take: this process (RateLimits), or all replicas together (SharedLimits)."""

    async def start(self) -> None:
        """Begin; called once, before the first request."""

    async def close(self) -> None:
        """Let go of what others may have."""

    def now(self) -> float:
        """A clock that never goes back."""

    async def enter(self, principal: Principal) -> Reservation:
        """Count one more request of a key, whatever its size, or raise when to retry."""

    async def take(self, account: KeyAccount, taken: Reservation | None, wanted: Wanted) -> float:
        """The moment from which it counts, or raise; taken: what the request has already."""

    def changed(self, account: KeyAccount, seconds: Iterable[int]) -> None:
        """Less, or more, was taken in these seconds, or fewer run."""

    def headers(self, principal: Principal) -> dict[str, str]:
        """x-ratelimit-{limit,remaining,reset}-{requests,tokens} of a key; none for what is unlimited."""

    def headers_of(self, account: KeyAccount) -> dict[str, str]:
        """The same of an account."""


class Reservation:
    """What one request may take, until it is settled: a slot from the start, tokens once they are known."""

    def __init__(self, limits: KeyLimits, account: KeyAccount, now: float) -> None:
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
        return self._limits.headers_of(self._account)

    async def expect(self, num_tokens: int, num_spent: int) -> None:
        """Take what it costs at least, by its bytes, before anything is made of them; a part of what grow() takes.

        num_spent: what looking at them costs, also if the request is refused afterwards.
        """
        if not num_tokens:
            return
        now = await self._limits.take(self._account, self, Wanted(num_tokens=num_tokens))
        self._charge(num_tokens, now)
        self._num_expected += num_tokens
        self._num_spent += min(num_spent, num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Something was done for it that no answer will pay for."""
        self._num_spent += num_tokens

    async def grow(self, num_tokens: int, *, num_answers: int = 1, open_ended: Sequence[int] = ()) -> None:
        """Take tokens, and a slot for each answer, or raise when to retry; what it has stays its own.

        open_ended: the most tokens of each answer without max_tokens; as many are taken as are to be expected.
        """
        account = self._account
        num_slots = max(num_answers - self.num_slots, 0)
        self._num_known += num_tokens
        self._num_open_ended += len(open_ended)
        num_tokens += sum(map(account.pace.expected_answer.within, open_ended))
        num_tokens -= (covered := min(self._num_expected, num_tokens))
        now = await self._limits.take(account, self, Wanted(num_tokens=num_tokens, num_slots=num_slots))
        self._num_expected -= covered
        self._has_grown = True
        account.num_running += num_slots
        self.num_slots += num_slots
        self._charge(num_tokens, now)

    def withdraw(self) -> None:
        """The request was refused before anything was computed, so it is no request of the minute."""
        self.settle()
        if self._is_counted:
            self._is_counted = False
            self._account.requests.correct(self._second, -1, self._limits.now())
            self._limits.changed(self._account, [self._second])

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
        seconds = {second for second, _ in self._charges}
        if surplus < 0:  # it took more than it reserved: the excess counts from now on
            seconds.add(self._account.tokens.charge(-surplus, now))
        for second, amount in reversed(self._charges):
            given_back = max(0, min(surplus, amount))
            self._account.tokens.correct(second, -given_back, now)
            surplus -= given_back
        self.num_tokens = used_tokens
        self._limits.changed(self._account, seconds)

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
        self._limits.changed(self._account, ())

    def _observe_use(self) -> None:
        account = self._account
        account.num_reserved -= self.num_tokens
        if self._num_used and self.num_tokens:
            account.observe_use(self.num_tokens, self._num_used)
        if self._num_used and self._num_open_ended:
            account.pace.expected_answer.observe((self._num_used - self._num_known) / self._num_open_ended)

    def _charge(self, num_tokens: int, now: float) -> None:
        self._charges.append((self._account.tokens.charge(num_tokens, now), num_tokens))
        self._account.num_reserved += num_tokens
        self.num_tokens += num_tokens
