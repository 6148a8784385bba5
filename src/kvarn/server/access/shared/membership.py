"""This replica among the others: its heartbeat, Redis's clock, and whether Redis can be relied on.

    shared ──Redis fails──> away ──it answers──> joining (all tell what they took) ──two heartbeats──> shared

Knows Redis and time; what is counted is known to limits.py.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvarn.observe.logs import with_fields
from kvarn.server.access.shared.account import PREFIX
from kvarn.server.access.shared.replicas import Replicas, Use, read_replicas, write_report
from kvarn.server.access.shared.store import RedisStore, StoreAway

log = logging.getLogger("kvarn.server.limits")

ROUND_TRIP_S = 0.05
REPLICAS_KEY = f"{PREFIX}:{{replicas}}"


@dataclass(frozen=True, slots=True)
class BeatTimes:
    """How often replicas speak, and how long their silence is taken for nothing. Leases are whole seconds."""

    beat_s: float = 1.0  # between two heartbeats
    join_s: float = 2.5  # for all replicas to notice that Redis is back, and to tell it what they took without it
    replica_lease_s: int = 5  # a replica that is silent for so long is gone
    slot_lease_s: int = 10  # and its requests run no more
    renew_s: float = 3.0  # between two renewals of an account's slots


class LimitsObserver(Protocol):
    """What the metrics are told."""

    def request_refused(self, tier: str, reason: str) -> None: ...
    def limits_failed(self, reason: str) -> None: ...
    def update_limits(self, is_away: bool, num_replicas: int) -> None: ...
    def limits_asked(self, seconds: float) -> None: ...


class Membership:
    """One replica's view of Redis and the other replicas."""

    def __init__(
        self, store: RedisStore, observer: LimitsObserver, clock: Callable[[], float], times: BeatTimes
    ) -> None:
        self.id = secrets.token_hex(6)
        self.replicas: Replicas | None = None  # None: Redis has never answered
        self.offset_s = 0  # added to an own second: the one that Redis calls it
        self._store = store
        self._observer = observer
        self._now = clock
        self._times = times
        self._shared_from = math.inf  # inf: Redis is away

    @property
    def is_away(self) -> bool:
        """Whether Redis does not answer."""
        return self._shared_from == math.inf

    @property
    def is_shared(self) -> bool:
        """Whether Redis alone decides."""
        return self._now() >= self._shared_from

    async def beat(self, uses: Mapping[str, Use]) -> bool:
        """Tell the others what this replica has taken, and hear the same; whether Redis is there again, or emptied."""
        try:
            told = await self._tell(uses)
        except StoreAway as error:
            self.fail(error)
            return False
        is_new, is_first = not told[1], self.replicas is None
        if is_first or (self.is_shared and not is_new):  # else some of the others may not have come back yet
            self.replicas = read_replicas(self.id, told[2:], self.replicas)
        if is_new:
            self.learn_offset(float(told[0]))
        if is_new and not self.is_away:
            self.fail(StoreAway("emptied", "it does not know this replica any more"))
        is_back = self.is_away and not is_first
        if is_back:
            log.info("Redis answers, the limits of keys are counted together again in %g s", self._times.join_s)
        if self.is_away:
            self._shared_from = self._now() + (0 if is_first else self._times.join_s)
        self._observer.update_limits(not self.is_shared, 0 if self.replicas is None else self.replicas.number)
        return is_back

    async def confirm(self, uses: Mapping[str, Use]) -> None:
        """Raise StoreAway if Redis was emptied since the last heartbeat."""
        if not (await self._tell(uses))[1]:
            raise StoreAway("emptied", "it does not know this replica any more")

    async def leave(self) -> None:
        """Tell the others that this replica ends."""
        await self._store.beat(REPLICAS_KEY, [self.id, self._times.replica_lease_s, ""])

    def learn_offset(self, redis_time: float) -> None:
        """Rounded up, so that nothing leaves Redis's minute earlier than ours."""
        self.offset_s = math.ceil(redis_time - self._now() + ROUND_TRIP_S)

    def fail(self, error: StoreAway) -> None:
        """Redis is away: from here on this replica counts by itself."""
        self._observer.limits_failed(error.reason)
        number = 0 if self.replicas is None else self.replicas.number
        if not self.is_away or not number:
            words = "Redis is away, keys are limited by each of %d replicas by itself" if number else UNKNOWN
            log.error(words, *([number] if number else []), extra=with_fields(reason=error.reason, error=str(error)))
        self._shared_from = math.inf
        self._observer.update_limits(True, number)

    async def _tell(self, uses: Mapping[str, Use]) -> list[Any]:
        return await self._store.beat(REPLICAS_KEY, [self.id, self._times.replica_lease_s, write_report(uses)])


UNKNOWN = "Redis has not answered yet, requests of limited keys are refused"
