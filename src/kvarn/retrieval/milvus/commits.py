"""Which rows of a Milvus collection count: every change has a version, and one small record says which are complete.

    rows of version v written -> record (v, replacing) -> rows that v replaces removed -> record (v)
                               ^ here the change happens

Milvus has no transactions over several calls, so nothing is overwritten: readers look at rows up to the recorded
version only, and not at those it replaces. The record alternates between two places; if writing one of them is cut
short, the other still holds the last. Knows names and numbers; knows no chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PLACES = ("commit-0", "commit-1")


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The last complete change. is_replacing: rows of earlier versions of the same documents may still be there."""

    number: int = 0  # of the record; the higher one counts
    version: int = 0
    is_replacing: bool = False

    def after(self, version: int, *, is_replacing: bool = False) -> VersionRecord:
        """The next record."""
        return VersionRecord(self.number + 1, version, is_replacing)

    def fact(self) -> dict[str, Any]:
        """The record under the name of its place."""
        return {PLACES[self.number % 2]: [self.number, self.version, int(self.is_replacing)]}


def last_commit(facts: Mapping[str, Any]) -> VersionRecord:
    """The newest of the records that are there."""
    found = [VersionRecord(number, version, bool(flag)) for number, version, flag in facts.values()]
    return max(found, key=lambda commit: commit.number, default=VersionRecord())
