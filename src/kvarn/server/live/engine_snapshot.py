"""An engine at one moment, for whoever watches it: its figures, its blocks, and which sequence holds which.

Taken between two steps on the engine's thread. Knows ids and counts, never a text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvarn.engine.engine import Engine
from kvarn.engine.stats import EngineStats
from kvarn.request import RequestState


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One moment. Blocks are those of the layers that keep all."""

    stats: EngineStats
    block_states: npt.NDArray[np.uint8]  # kvarn.kv.pool: FREE, CACHED, HELD or SHARED
    held_ids: Mapping[str, list[int]]  # block ids by the id of the request that holds them
    is_running: Mapping[str, bool]  # by the id of each request that has not ended; others wait
    cost_s: float  # of taking it, for which no step could run


def take_snapshot(engine: Engine) -> EngineSnapshot:
    """For Client.call(): runs on the engine's thread."""
    started_at = time.perf_counter()
    group = engine.kv.groups[0]
    held = {sequence: table.held_ids for sequence, table in group.tables.items()}
    stats, states = engine.stats(), group.pool.states()
    running = {one.id: one.state is RequestState.RUNNING for one in engine.scheduler.requests()}
    return EngineSnapshot(stats, states, held, running, time.perf_counter() - started_at)
