"""Snapshots of all loaded engines, for everybody who watches: taken while somebody does, and by all of them together.

A snapshot keeps its engine from stepping while it is taken, so the more one costs the rarer they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from kvarn.errors import KvarnError
from kvarn.server.live.engine_snapshot import EngineSnapshot, take_snapshot
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.models.served_model import ServedModel

INTERVAL_S = 0.25  # between two snapshots
MAX_COST = 0.004  # share of an engine's time that they may take
TIMEOUT_S = 1.0  # a step that takes longer is not waited for: the engine is then shown as it was


@dataclass(frozen=True, slots=True)
class LiveSample:
    """All loaded engines at one moment, by the id of their model."""

    taken_at: float  # time.monotonic()
    models: Mapping[str, ServedModel]
    engines: Mapping[str, EngineSnapshot]


class LiveSampler:
    """For one event loop."""

    def __init__(self, models: ModelPool) -> None:
        self._models = models
        self._last = LiveSample(-INTERVAL_S, {}, {})
        self._taking = asyncio.Lock()
        self.num_watchers = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Somebody watches while the block runs."""
        self.num_watchers += 1
        try:
            yield
        finally:
            self.num_watchers -= 1

    @property
    def interval_s(self) -> float:
        """How long a sample is shown."""
        return max([INTERVAL_S, *(one.cost_s / MAX_COST for one in self._last.engines.values())])

    async def sample(self) -> LiveSample:
        """The last sample, or a new one if that is old."""
        async with self._taking:
            if time.monotonic() - self._last.taken_at >= self.interval_s * 0.9:
                loaded = self._models.loaded
                taken = await asyncio.gather(*(self._snapshot(model) for model in loaded))
                engines = {model.id: one for model, one in zip(loaded, taken, strict=True) if one is not None}
                self._last = LiveSample(time.monotonic(), {model.id: model for model in loaded}, engines)
        return self._last

    async def _snapshot(self, model: ServedModel) -> EngineSnapshot | None:
        asked: Future[EngineSnapshot] = model.llm.llm.client.call(take_snapshot)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), TIMEOUT_S)
        except (TimeoutError, KvarnError):
            return self._last.engines.get(model.id)
