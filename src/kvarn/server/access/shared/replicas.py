"""Which replicas there are, what each has taken of the keys' limits, and which part of a limit is whose.

While Redis is away, a replica keeps what it has used of a limit, and of what was free it may use its part. The parts of
all replicas add up to the limit, as far as they know of each other: reports are as old as a heartbeat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Use = tuple[int, int, int]  # requests and tokens of the last minute, slots
NO_USE: Use = (0, 0, 0)
MAX_REPORTED = 1000  # accounts of one report


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas as Redis last told them."""

    number: int
    rank: int  # of this one among them
    others: Mapping[str, Use] = field(default_factory=dict)  # by account: of all others together
    growth: Mapping[str, Use] = field(default_factory=dict)  # since the heartbeat before

    def others_by_now(self, account: str) -> Use:
        """What the others have taken, if they went on as between the last two heartbeats."""
        known, more = self.others.get(account, NO_USE), self.growth.get(account, NO_USE)
        return known[0] + more[0], known[1] + more[1], known[2] + more[2]

    def part(self, limit: int | None, own: int, others: int, salt: int) -> int | None:
        """How much of a limit is this replica's; salt: who gets what cannot be divided."""
        if limit is None:
            return None
        each, rest = divmod(max(0, limit - own - others), self.number)
        return own + each + ((self.rank + salt) % self.number < rest)


def read_replicas(replica: str, told: Sequence[bytes], before: Replicas | None) -> Replicas:
    """What beat.lua tells: (id, report) after (id, report); before: what it told the last time."""
    reports = {told[index].decode(): told[index + 1] for index in range(0, len(told), 2)}
    ids = sorted({*reports, replica})
    sums: dict[str, Use] = {}
    for other, report in reports.items():
        if other != replica:
            for account, (requests, tokens, slots) in json.loads(report).items():
                others = sums.get(account, NO_USE)
                sums[account] = (others[0] + requests, others[1] + tokens, others[2] + slots)
    earlier = sums if before is None else before.others
    growth = {account: _growth(use, earlier.get(account, NO_USE)) for account, use in sums.items()}
    return Replicas(len(ids), ids.index(replica), sums, growth)


def _growth(now: Use, earlier: Use) -> Use:
    return max(0, now[0] - earlier[0]), max(0, now[1] - earlier[1]), max(0, now[2] - earlier[2])


def write_report(uses: Mapping[str, Use]) -> str:
    """This replica's own use, by account."""
    busiest = sorted(uses.items(), key=lambda item: item[1], reverse=True)[:MAX_REPORTED]
    return json.dumps({account: use for account, use in busiest if use != NO_USE}, separators=(",", ":"))
