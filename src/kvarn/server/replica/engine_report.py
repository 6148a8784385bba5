"""What an engine tells its cluster: changes of its prefix cache and its load. Taken between two of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.engine.engine import Engine
from kvarn.routing.changes import pack_changes
from kvarn.routing.feed import ReplicaLoad


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Since the last one."""

    changes: bytes
    is_all: bool  # what was told before does not count any more
    load: ReplicaLoad
    everything: bytes | None  # for who has been told nothing yet


def take_report(wants_everything: bool, engine: Engine) -> EngineReport:
    """For EngineClient.call(); wants_everything: somebody has been told nothing yet."""
    load, journal = take_load(engine), engine.kv.journal
    if journal is None:
        return EngineReport(b"", False, load, b"" if wants_everything else None)
    is_all, changes = journal.take()
    everything = pack_changes(journal.everything()) if wants_everything else None
    return EngineReport(pack_changes(changes), is_all, load, everything)


def take_load(engine: Engine) -> ReplicaLoad:
    """How busy it is. For EngineClient.call()."""
    scheduler = engine.scheduler
    left = sum(max(0, one.num_prompt - one.num_computed) for one in scheduler.requests())
    return ReplicaLoad(left, scheduler.num_running, scheduler.num_waiting)
