"""Which rows of a Milvus collection are valid: every change has a version, and a small record names the last whole one.

    rows of version v written -> record (v, replacing) -> rows that v replaces removed -> record (v)
                               ^ here the change takes effect

Milvus has no transactions over several calls, so nothing is overwritten: readers see only rows up to the recorded
version, and not those it replaces. Each writer has two slots of its own for its records and uses them in turns: if
writing one of them is interrupted, the other still holds the last, and a writer that comes back from the dead
overwrites nobody's. The record of the highest epoch counts. Knows names and numbers; knows no chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

SLOT = "commit-"
MAX_VOID = 64

Epoch = tuple[int, str]  # of a writer: its ticket, its id. Each writer's is higher than those of all before it


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The last complete change. is_replacing: rows of earlier versions of the same documents may still be there."""

    epoch: Epoch = (0, "")  # of the writer
    number: int = 0  # of the record; the highest of an epoch is valid
    version: int = 0
    is_replacing: bool = False
    num_bytes: int = 0  # of all valid rows
    void: tuple[int, ...] = ()  # versions of writers that were given up: their rows never count

    @property
    def next_version(self) -> int:
        return max(self.version, *self.void, 0) + 1

    def after(self, epoch: Epoch, version: int, *, is_replacing: bool = False, num_bytes: int = 0) -> VersionRecord:
        """The next record."""
        return VersionRecord(epoch, self.number + 1, version, is_replacing, num_bytes, self.void)

    def taken_over(self, epoch: Epoch) -> VersionRecord:
        """The same contents, from now on another writer's: what the one before has in flight is void."""
        void = (*self.void, self.next_version)[-MAX_VOID:]
        return replace(self, epoch=epoch, number=self.number + 1, void=void)

    def facts(self) -> dict[str, Any]:
        """The record under the name of its slot."""
        return {f"{SLOT}{self.epoch[1]}-{self.number % 2}": asdict(self)}


def last_commit(facts: Mapping[str, Any]) -> VersionRecord:
    """The record that counts, of those among some facts."""
    found = [_record(value) for name, value in facts.items() if name.startswith(SLOT)]
    return max(found, key=lambda one: (one.epoch, one.number), default=VersionRecord())


def outdated(facts: Mapping[str, Any], last: VersionRecord) -> list[str]:
    """The names of records of writers before the last."""
    return [name for name, value in facts.items() if name.startswith(SLOT) and _record(value).epoch < last.epoch]


def _record(value: Mapping[str, Any]) -> VersionRecord:
    ticket, owner = value["epoch"]
    return VersionRecord(**{**value, "epoch": (ticket, owner), "void": tuple(value["void"])})
