"""One writer at a time, though Milvus has no locks: Lamport's bakery on rows that each writer writes for itself.

    take a ticket -> wait until nobody alive has a lower one -> change -> give it back
                                     |
                    a dead one's: make its records void, then go on

Needs no clock that agrees with another: a claim is dead when it has not changed for as long as its own lease says,
measured here. A writer that was only frozen, and comes back, is fenced: its record has a lower epoch than its
successor's, and its check after a change fails. Knows claims and epochs; knows no documents.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvarn.errors import CollectionLocked, CollectionNotFound, StorageError
from kvarn.retrieval.milvus.commits import Epoch, VersionRecord, last_commit, outdated
from kvarn.retrieval.milvus.facts import CollectionFacts

LEASE_S = 30.0  # longer than any call that changes something
RENEWED_AFTER = 0.1  # of the lease
VALID = 0.8  # of the lease; the rest is for what passes between two clocks
POLL_S = 0.1
CLAIM = "writer-"


@dataclass(frozen=True, slots=True)
class WriterClaim:
    """What one writer tells all others. ticket: 0 while it is being chosen."""

    owner: str
    place: str
    lease_s: float
    ticket: int = 0
    beat: int = 0  # changes as long as it lives
    is_taking_over: bool = False
    has_failed: bool = False  # it will not go on, and has left something half done

    @property
    def epoch(self) -> Epoch:
        return (self.ticket, self.owner)

    @property
    def name(self) -> str:
        return f"{CLAIM}{self.owner}"


class WriterLease:
    """The right to change one collection. For one thread at a time."""

    def __init__(self, facts: CollectionFacts, lease_s: float = LEASE_S) -> None:
        self._facts = facts
        self._lease_s = lease_s
        self._claim: WriterClaim | None = None
        self._renewed_at = 0.0
        self._seen: dict[str, tuple[WriterClaim, float]] = {}  # others' claims, and since when they are as they are

    @property
    def epoch(self) -> Epoch:
        assert self._claim is not None
        return self._claim.epoch

    def acquire(self, wait_s: float) -> tuple[VersionRecord, bool]:
        """Become the writer, or CollectionLocked; the last record, and whether its change has to be completed."""
        give_up_at = time.monotonic() + wait_s
        self._take_ticket()
        try:
            while True:
                facts = self._facts.read()
                self._require_not_overtaken(facts)
                before = self._before(facts)
                alive = [one for one in before if not self._is_dead(one)]
                if not alive:
                    return self._take_over(before) if before else (last_commit(facts), False)
                if time.monotonic() >= give_up_at:
                    raise CollectionLocked(_told(alive[0]))
                time.sleep(POLL_S)
                self.require()
        except BaseException:
            self.release()
            raise

    def require(self) -> None:
        """Before each change: tell the others that this writer lives; StorageError if it was silent too long."""
        assert self._claim is not None
        silent_s = time.monotonic() - self._renewed_at
        if silent_s > VALID * self._lease_s:
            raise StorageError(
                f"this process stood still for {silent_s:.0f} s, and another one may be changing the collection by "
                "now; the change was not completed: make it again"
            )
        if silent_s > RENEWED_AFTER * self._lease_s:
            self._tell(replace(self._claim, beat=self._claim.beat + 1))

    def check(self) -> None:
        """After a record: StorageError if another writer has taken over, and the change may be void."""
        facts = self._facts.read()
        self._require_not_overtaken(facts)
        last = last_commit(facts)
        stray = [one.name for one in _claims(facts) if one.ticket and one.epoch < last.epoch]
        self._facts.forget([*stray, *outdated(facts, last)])

    def release(self, *, has_failed: bool = False) -> None:
        """Let others change the collection. has_failed: something is half done, which the next writer removes."""
        claim, self._claim = self._claim, None
        if claim is None:
            return
        with suppress(StorageError, CollectionNotFound):  # the lease ends by itself, too
            if has_failed:
                self._facts.write({claim.name: asdict(replace(claim, has_failed=True))})
            else:
                self._facts.forget([claim.name])

    def _require_not_overtaken(self, facts: Mapping[str, Any]) -> None:
        is_given_up = any(one.is_taking_over and one.epoch > self.epoch for one in _claims(facts))
        if is_given_up or last_commit(facts).epoch > self.epoch:
            raise StorageError(
                "this process stood still, and another one has taken over the collection: look whether the last change "
                "is there, or make it again"
            )

    def _take_ticket(self) -> None:
        began = time.monotonic()
        place = f"process {os.getpid()} on {socket.gethostname()}"
        self._tell(WriterClaim(uuid.uuid4().hex, place, self._lease_s))
        facts = self._facts.read()
        ticket = 1 + max([last_commit(facts).epoch[0], *(one.ticket for one in _claims(facts))])
        assert self._claim is not None
        self._tell(replace(self._claim, ticket=ticket, beat=1))
        if time.monotonic() - began > VALID * self._lease_s:  # others may have stopped to wait for it
            self.release()
            raise StorageError("Milvus answers too slowly to agree with other writers; try again")

    def _tell(self, claim: WriterClaim) -> None:
        now = time.monotonic()
        self._claim = claim  # also if the answer is lost
        self._facts.write({claim.name: asdict(claim)})
        self._renewed_at = now

    def _before(self, facts: Mapping[str, Any]) -> list[WriterClaim]:
        """The claims of those that are in front of this one, or may be, and may still be writers."""
        last = last_commit(facts).epoch
        others = [one for one in _claims(facts) if one.owner != self.epoch[1]]
        now = time.monotonic()
        known = {one.owner: self._seen.get(one.owner, (one, now)) for one in others}
        self._seen = {one.owner: known[one.owner] if known[one.owner][0] == one else (one, now) for one in others}
        return [one for one in others if not one.ticket or last <= one.epoch < self.epoch]

    def _is_dead(self, claim: WriterClaim) -> bool:
        return claim.has_failed or time.monotonic() - self._seen[claim.owner][1] > claim.lease_s

    def _take_over(self, dead: list[WriterClaim]) -> tuple[VersionRecord, bool]:
        """What the dead have recorded counts, what they have in flight is void, should they come back."""
        assert self._claim is not None
        self._tell(replace(self._claim, is_taking_over=True, beat=self._claim.beat + 1))
        facts = self._facts.read()  # after that: a change that is recorded later fails at its check
        self._require_not_overtaken(facts)
        record = last_commit(facts).taken_over(self.epoch)
        self._facts.write(record.facts())
        self._facts.forget([*(one.name for one in dead), *outdated(facts, record)])
        return record, True


def _claims(facts: Mapping[str, Any]) -> list[WriterClaim]:
    return [WriterClaim(**value) for name, value in facts.items() if name.startswith(CLAIM)]


def _told(claim: WriterClaim) -> str:
    return (
        f"the collection is being changed by {claim.place}; try again when it has ended, or after "
        f"{claim.lease_s:.0f} s if it was killed"
    )
