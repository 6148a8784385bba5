"""Which rows of a Milvus collection are valid: every change has a version, and a small record names the last whole one.

    rows of version v written -> record (v, replacing) -> rows that v replaces removed -> record (v)
                               ^ here the change takes effect

Milvus has no transactions over several calls, so nothing is overwritten: readers see only rows up to the recorded
version, and not those it replaces. The record alternates between two slots; if writing one of them is interrupted, the
other still holds the last. Knows names and numbers; knows no chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SLOTS = ("commit-0", "commit-1")


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The last complete change. is_replacing: rows of earlier versions of the same documents may still be there."""

    number: int = 0  # of the record; the highest is valid
    version: int = 0
    is_replacing: bool = False

    def after(self, version: int, *, is_replacing: bool = False) -> VersionRecord:
        """The next record."""
        return VersionRecord(self.number + 1, version, is_replacing)

    def meta(self) -> dict[str, Any]:
        """The record under the name of its slot."""
        return {SLOTS[self.number % 2]: [self.number, self.version, int(self.is_replacing)]}


def last_commit(slots: Mapping[str, Any]) -> VersionRecord:
    """The newest record of those slots that are written."""
    found = [VersionRecord(number, version, bool(flag)) for number, version, flag in slots.values()]
    return max(found, key=lambda commit: commit.number, default=VersionRecord())
