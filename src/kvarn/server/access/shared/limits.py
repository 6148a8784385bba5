"""The limits of keys, counted over all replicas in Redis; without Redis, this replica's part of them.

The rules are those of RateLimits, applied to what all have taken together. Nothing waits longer for Redis than the
store's deadline, and only calls that are under way when it fails. For one thread: the event loop's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvarn.errors import LimitsUnavailable, RateLimited
from kvarn.server.access.account import KeyAccount
from kvarn.server.access.keys import Principal
from kvarn.server.access.limits import MIN_ACCOUNTS, RateLimits
from kvarn.server.access.reservation import KeyLimits, Reservation, Wanted
from kvarn.server.access.shared.account import SharedAccount, TakeReply, is_limited, read_reply
from kvarn.server.access.shared.membership import BeatTimes, LimitsObserver, Membership
from kvarn.server.access.shared.replicas import Use
from kvarn.server.access.shared.store import RedisStore, StoreAway

MAX_TRIES = 4
AT_ONCE = 32  # accounts of which Redis is told at a time
NOTHING, EVERYTHING = Wanted(), Wanted(1, 1, 1)


class SharedLimits:
    """Limits, in one Redis for all replicas."""

    def __init__(
        self,
        store: RedisStore,
        observer: LimitsObserver,
        is_closed_when_away: bool = False,
        times: BeatTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._times = BeatTimes() if times is None else times
        self._observer = observer
        self._is_closed_when_away = is_closed_when_away
        self._rules = RateLimits(clock, observer.request_refused)
        self._membership = Membership(store, observer, self._rules.now, self._times)
        self._number = 0  # of the last command
        self._accounts: dict[str, SharedAccount] = {}
        self._prune_at = MIN_ACCOUNTS
        self._flushes: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look for Redis, and go on doing so. A start waits a little longer than a request does."""
        for _ in range(MAX_TRIES):
            await self._beat()
            if not self._membership.is_away:
                break
        self._beating = asyncio.create_task(self._keep_beating())

    async def close(self) -> None:
        """Tell what is left to tell, and leave."""
        if self._beating is not None:
            self._beating.cancel()
        with suppress(StoreAway):  # leases end by themselves
            await self._tell_due()
            if not self._membership.is_away:
                await self._membership.leave()
        await self._store.close()

    def now(self) -> float:
        """A clock that never goes back."""
        return self._rules.now()

    async def enter(self, principal: Principal) -> Reservation:
        """Count one more request of a key, whatever its size, or raise when to retry."""
        account = self._account(principal)
        account.num_entering += 1
        try:
            now = await self.take(account.own, None, Wanted(num_requests=1, num_slots=1))
            return Reservation(self, account.own, now)
        finally:
            account.num_entering -= 1

    async def take(self, account: KeyAccount, taken: Reservation | None, wanted: Wanted) -> float:
        """The moment from which it counts, or raise when to retry."""
        if taken is not None:
            num_tokens, num_slots = taken.num_tokens + wanted.num_tokens, taken.num_slots + wanted.num_slots
            self._rules.require_possible(account, num_tokens, num_slots)
        shared = self._accounts[account.key_id]
        if not is_limited(account.tier, wanted):
            return self.now()
        if self._membership.is_away:
            return self._take_divided(shared, taken, wanted)
        try:
            return await self._take_shared(shared, taken, wanted)
        except StoreAway as error:
            self._membership.fail(error)
            return self._take_divided(shared, taken, wanted)

    def changed(self, account: KeyAccount, seconds: Iterable[int]) -> None:
        """Tell Redis soon; several changes together."""
        shared = self._accounts.get(account.key_id)
        if shared is None or not is_limited(account.tier, EVERYTHING):
            return
        shared.changed.update(seconds)
        if not self._membership.is_away and not shared.is_flushing:
            shared.is_flushing = True
            task = asyncio.create_task(self._flush(shared))
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)

    def headers(self, principal: Principal) -> dict[str, str]:
        """What is left to a key, without taking anything."""
        return self._account(principal).headers(self.now())

    def headers_of(self, account: KeyAccount) -> dict[str, str]:
        """The same of an account."""
        shared = self._accounts.get(account.key_id)
        return account.headers(self.now()) if shared is None else shared.headers(self.now())

    async def _take_shared(self, shared: SharedAccount, taken: Reservation | None, wanted: Wanted) -> float:
        async with shared.lock:
            if self._membership.is_away:  # since this one began to wait
                return self._take_divided(shared, taken, wanted)
            if not self._membership.is_shared:  # others may still count by themselves: both must have room
                self._take_divided(shared, taken, wanted)
            elif shared.is_divided:
                shared.unite()
            reply, now = await self._ask(shared, wanted)
        if reply.status == "ok":
            return now
        self._rules.require(shared.seen, taken, wanted)
        self._observer.request_refused(shared.own.tier.name, reply.status)
        raise RateLimited("the limit was met a moment ago; try again", retry_after_s=1.0, reason=reply.status)

    def _take_divided(self, shared: SharedAccount, taken: Reservation | None, wanted: Wanted) -> float:
        """By this replica's part of the limits, or not at all."""
        replicas = self._membership.replicas
        if self._is_closed_when_away or replicas is None:
            self._observer.request_refused(shared.own.tier.name, "limits")
            raise LimitsUnavailable("what this key has taken cannot be counted now; try again in 2 s")
        shared.divide(replicas, self.now())
        self._rules.require(shared.own, taken, wanted)
        return self.now()

    async def _ask(self, shared: SharedAccount, wanted: Wanted) -> tuple[TakeReply, float]:
        """Tell Redis what it does not know, and ask for more; with the account's lock."""
        is_confirmed = False
        for _ in range(MAX_TRIES):
            reply, now = await self._ask_once(shared, wanted, is_confirmed)
            if reply.status == "new":  # no replica has used the key in the last minute, or Redis was emptied
                await self._membership.confirm(self._uses())
                is_confirmed = True
            elif reply.status == "clock":
                self._membership.learn_offset(reply.time)
            elif reply.status == "unknown":
                raise StoreAway("emptied", "it does not know a key that it knew")
            elif reply.status != "stale":
                return reply, now
        raise StoreAway("error", f"it answers {reply.status!r}")

    async def _ask_once(self, shared: SharedAccount, wanted: Wanted, is_confirmed: bool) -> tuple[TakeReply, float]:
        now, began = self.now(), time.perf_counter()
        told, second, offset_s = shared.untold(now), math.floor(now), self._membership.offset_s
        self._number += 1
        head: list[str | int] = [self._membership.id, self._number, int(shared.is_known(now)), int(is_confirmed)]
        head.append(self._times.slot_lease_s)
        arguments = head + shared.take_arguments(wanted, second, told, offset_s)
        keys = shared.take_keys(second, told, offset_s)
        shared.changed.clear()
        shared.asked.add(second)
        shared.synced_at = None  # until it is known that it arrived: else all is told again
        reply = read_reply(await self._store.take(keys, arguments))
        self._observer.limits_asked(time.perf_counter() - began)
        if reply.has_counted:
            shared.observe(reply, wanted if reply.status == "ok" else NOTHING, offset_s, self.now())
        return reply, now

    async def _flush(self, shared: SharedAccount) -> None:
        """Tell Redis what has changed, and that the account's requests still run."""
        try:
            async with shared.lock:
                shared.is_flushing = False
                if not self._membership.is_away:
                    await self._ask(shared, NOTHING)
        except StoreAway as error:
            self._membership.fail(error)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._times.beat_s)
            try:
                await self._beat()
            except Exception as error:  # such as a report that is no JSON: whatever happens, the next beat comes
                self._membership.fail(StoreAway("error", type(error).__name__))

    async def _beat(self) -> None:
        if await self._membership.beat(self._uses()):
            for account in self._accounts.values():
                account.synced_at = None
        await self._tell_due()

    def _uses(self) -> dict[str, Use]:
        now = self.now()
        return {one.tag: one.use(now) for one in self._accounts.values()}

    async def _tell_due(self) -> None:
        """Tell what was not told yet, and keep the slots of what runs."""
        now = self.now()
        due = [one for one in self._accounts.values() if one.is_due(now, self._times.renew_s)]
        for begin in range(0, len(due), AT_ONCE):
            if self._membership.is_away:
                return
            await asyncio.gather(*(self._flush(one) for one in due[begin : begin + AT_ONCE]))

    def _account(self, principal: Principal) -> SharedAccount:
        account = self._accounts.get(principal.key_id)
        if account is None:
            if len(self._accounts) >= self._prune_at:
                self._prune()
            account = self._accounts[principal.key_id] = SharedAccount(principal)
        account.update_tier(principal)
        return account

    def _prune(self) -> None:
        now = self.now()
        self._accounts = {key_id: one for key_id, one in self._accounts.items() if not one.is_idle(now)}
        self._prune_at = max(MIN_ACCOUNTS, 2 * len(self._accounts))


def make_limits(url: str, when_away: str, observer: LimitsObserver) -> KeyLimits:
    """Limits in the Redis at an address; "": in this process."""
    if not url:
        return RateLimits(on_refused=observer.request_refused)
    return SharedLimits(RedisStore(url), observer, is_closed_when_away=when_away == "closed")
