"""One key's account as all replicas count it: what this one took, what the others did, and what Redis has to be told.

Own seconds are those of this process's clock; offset_s added to one is the second that Redis calls it. Makes the
arguments of take.lua and reads its reply; knows no connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.server.access.account import WINDOW_S, AnswerPace, KeyAccount
from kvarn.server.access.keys import Principal
from kvarn.server.access.reservation import Wanted
from kvarn.server.access.shared.replicas import NO_USE, Replicas, Use
from kvarn.server.access.tiers import Tier

PREFIX = "kvarn:limits"


@dataclass(frozen=True, slots=True)
class TakeReply:
    """What take.lua tells; seconds are Redis's."""

    status: str
    time: float
    requests: int = 0
    tokens: int = 0
    running: int = 0
    newest: tuple[int, int] = (0, 0)  # second of the last request, and of the last tokens
    charged: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {})  # of a refusal: requests and tokens by second
    has_counted: bool = False  # else nothing was changed, and nothing is told but the time


def read_reply(reply: Sequence[Any]) -> TakeReply:
    """The reply of take.lua."""
    status, time = reply[0].decode(), float(reply[1])
    if len(reply) < 7:
        return TakeReply(status, time)
    requests, tokens, running, *newest = map(int, reply[2:7])
    by_second = [tuple(map(int, reply[index : index + 3])) for index in range(7, len(reply), 3)]
    charged = {at: amount for at, amount, _ in by_second}, {at: amount for at, _, amount in by_second}
    return TakeReply(status, time, requests, tokens, running, (newest[0], newest[1]), charged, has_counted=True)


class SharedAccount:
    """One key. A call at a time: each tells Redis totals, which another in flight would change."""

    def __init__(self, principal: Principal) -> None:
        pace = AnswerPace()
        self.own = KeyAccount(principal, pace)
        self.seen = KeyAccount(principal, pace)  # of all replicas together, as Redis last told it
        self.tag = hashlib.sha256(principal.key_id.encode()).hexdigest()[:24]
        self.lock = asyncio.Lock()
        self.synced_at: float | None = None  # when Redis last answered; None: it may know nothing, or wrong things
        self.changed: set[int] = set()  # own seconds that Redis does not know as they are
        self.asked: set[int] = set()  # own seconds in which Redis may have counted what was given up since
        self.is_divided = False  # the limits of own are a part of the tier's
        self.num_entering = 0
        self.is_flushing = False  # Redis is about to be told
        self._others = NO_USE
        self._heard_at = -math.inf  # of the others
        self._newest = (0, 0)  # own seconds

    @property
    def salt(self) -> int:
        """A number of the account, the same for all replicas."""
        return int(self.tag[:8], 16)

    def use(self, now: float) -> Use:
        """What this replica has taken."""
        self.own.requests.expire(now)
        self.own.tokens.expire(now)
        self.asked = {second for second in self.asked if now - second <= WINDOW_S + 1}
        return self.own.requests.total, self.own.tokens.total, self.own.num_running

    def is_idle(self, now: float) -> bool:
        return self.own.is_idle(now) and not self.num_entering and not self.lock.locked()

    def is_known(self, now: float) -> bool:
        """Whether Redis must know it."""
        return self.synced_at is not None and now - self.synced_at < WINDOW_S

    def is_due(self, now: float, renew_s: float) -> bool:
        """Whether Redis should be told something: what changed, or that its requests still run."""
        if self.synced_at is None:
            return bool(self.asked) or not self.own.is_idle(now)
        return bool(self.changed) or (self.own.num_running > 0 and now - self.synced_at > renew_s)

    def take_keys(self, second: int, told: Sequence[int], offset_s: int) -> list[str]:
        """KEYS of take.lua."""
        base = f"{PREFIX}:{{{self.tag}}}"
        return [base, f"{base}:running", *(f"{base}:{at + offset_s}" for at in (second, *told))]

    def take_arguments(self, wanted: Wanted, second: int, told: Sequence[int], offset_s: int) -> list[str | int]:
        """ARGV of take.lua from its slots on."""
        own, tier = self.own, self.own.tier
        limits = (tier.requests_per_min, tier.tokens_per_min, tier.concurrency)
        arguments: list[str | int] = [own.num_running]
        arguments += [wanted.num_requests, wanted.num_tokens, wanted.num_slots]
        arguments += [-1 if limit is None else limit for limit in limits]
        arguments.append(second + offset_s)
        requests, tokens = own.requests.charged(), own.tokens.charged()
        for at in told:
            arguments += [at + offset_s, requests.get(at, 0), tokens.get(at, 0)]
        return arguments

    def untold(self, now: float) -> list[int]:
        """Own seconds that Redis must hear of: those that changed, or all."""
        self.use(now)
        charged = {*self.own.requests.charged(), *self.own.tokens.charged()}
        return sorted(charged | self.asked if self.synced_at is None else charged & self.changed)

    def observe(self, reply: TakeReply, taken: Wanted, offset_s: int, now: float) -> None:
        """Note what all have taken; taken: what this call has added, which own does not have yet."""
        requests, tokens, running = self.use(now)
        self._others = (
            max(0, reply.requests - requests - taken.num_requests),
            max(0, reply.tokens - tokens - taken.num_tokens),
            max(0, reply.running - running - taken.num_slots),
        )
        self._heard_at = self.synced_at = now
        self.asked.clear()  # it was told what these seconds have, and refuses whatever comes late
        self._newest = (reply.newest[0] - offset_s, reply.newest[1] - offset_s)
        if reply.status != "ok":
            self.seen.requests.load({at - offset_s: amount for at, amount in reply.charged[0].items() if amount})
            self.seen.tokens.load({at - offset_s: amount for at, amount in reply.charged[1].items() if amount})
            self.seen.num_running, self.seen.num_reserved = reply.running, self.own.num_reserved

    def headers(self, now: float) -> dict[str, str]:
        """What is left: of the whole limit, or of this replica's part of it."""
        if self.is_divided:
            return self.own.headers(now)
        self.use(now)
        windows = ((self.seen.requests, self.own.requests), (self.seen.tokens, self.own.tokens))
        for (seen, own), others, newest in zip(windows, self._others[:2], self._newest, strict=True):
            charged = own.charged()
            charged[newest] = charged.get(newest, 0) + others
            seen.load(charged)
        return self.seen.headers(now)

    def divide(self, replicas: Replicas, now: float) -> None:
        """Count this replica's part of the limits, from what is known of the others."""
        if self.is_divided:
            return
        tier, own = self.own.tier, self.use(now)
        heard = self._others if now - self._heard_at < WINDOW_S else NO_USE
        others = tuple(map(max, heard, replicas.others_by_now(self.tag)))
        limits = (tier.requests_per_min, tier.tokens_per_min, tier.concurrency)
        parts = [replicas.part(*one, self.salt) for one in zip(limits, own, others, strict=True)]
        self.own.limit(*parts)
        self.is_divided = True

    def unite(self) -> None:
        """All replicas count together again."""
        tier = self.own.tier
        self.own.limit(tier.requests_per_min, tier.tokens_per_min, tier.concurrency)
        self.is_divided = False

    def update_tier(self, principal: Principal) -> None:
        """Take the limits of the key's tier, which may have changed since."""
        if principal.tier != self.own.tier:
            self.own.update_tier(principal)
            self.seen.update_tier(principal)
            self.is_divided = False


def is_limited(tier: Tier, wanted: Wanted) -> bool:
    """Whether the tier has a limit on any of it."""
    requests, tokens = tier.requests_per_min is not None, tier.tokens_per_min is not None
    has_slots = wanted.num_slots > 0 and tier.concurrency is not None
    return (wanted.num_requests > 0 and requests) or (wanted.num_tokens > 0 and tokens) or has_slots
