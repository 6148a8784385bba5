"""A backend that reports every forward and sample to an observer; replaces an engine's backend during a measurement.

Delegates everything and changes no result. Knows no benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch, BlockCopy, KVLayout, Sampled, SampleRows, Scored
from kvarn.backends.protocol import Backend, Hidden, LaunchingBackend
from kvarn.backends.resumable_forward import ResumableForward
from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.errors import DeviceLost
from kvarn.formats.weights import WeightSource
from kvarn.models.spec import ModelSpec, Pooling


class BackendObserver(Protocol):
    """Called on the engine's thread; times are of time.perf_counter()."""

    def forward_begins(self, batch: Batch, now: float) -> None: ...

    def call_ended(self, seconds: float) -> None:
        """A forward or a sample took so long."""


@contextmanager
def observed(client: EngineClient, observer: BackendObserver) -> Iterator[None]:
    """Let an observer see every forward and sample of an engine."""
    backend = client.call(lambda engine: engine.backend).result()
    client.call(lambda engine: _use(engine, ObservedBackend(backend, observer))).result()
    try:
        yield
    finally:
        client.call(lambda engine: _use(engine, backend)).result()


def _use(engine: Engine, backend: Backend) -> None:
    engine.backend = engine.decoder.backend = backend


class ObservedBackend:
    """Another backend, with an observer of its forwards and samples."""

    def __init__(self, backend: Backend, observer: BackendObserver) -> None:
        self._backend = backend
        self._observer = observer
        self.name = backend.name
        self.min_prompt_rows, self.free_prompt_rows = backend.min_prompt_rows, backend.free_prompt_rows
        self.runs_ahead = backend.runs_ahead

    def forward(self, batch: Batch) -> Hidden:
        started = time.perf_counter()
        self._observer.forward_begins(batch, started)
        hidden = self._backend.forward(batch)
        self._observer.call_ended(time.perf_counter() - started)
        return hidden

    def sample(self, hidden: Hidden, rows: SampleRows) -> Sampled:
        started = time.perf_counter()
        sampled = self._backend.sample(hidden, rows)
        self._observer.call_ended(time.perf_counter() - started)
        return sampled

    def sample_later(self, hidden: Hidden, rows: SampleRows) -> Callable[[], Sampled]:
        read = cast(LaunchingBackend, self._backend).sample_later(hidden, rows)

        def timed() -> Sampled:
            started = time.perf_counter()
            sampled = read()
            self._observer.call_ended(time.perf_counter() - started)
            return sampled

        return timed

    # Delegated unseen:

    @property
    def progress(self) -> int:
        return self._backend.progress

    @property
    def lost(self) -> DeviceLost | None:
        return self._backend.lost

    def unsupported(self, spec: ModelSpec) -> list[str]:
        return self._backend.unsupported(spec)

    def load(self, spec: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        self._backend.load(spec, weights, progress)

    def reserve_kv(self, layout: KVLayout, budget_bytes: int) -> int:
        return self._backend.reserve_kv(layout, budget_bytes)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._backend.copy_blocks(copies)

    def return_kv(self, block_ids: Iterable[int], group: int = 0) -> None:
        self._backend.return_kv(block_ids, group)

    def return_states(self, slots: Iterable[int]) -> None:
        self._backend.return_states(slots)

    def begin(self, batch: Batch) -> ResumableForward:
        return self._backend.begin(batch)

    def score(self, hidden: Hidden, targets: npt.NDArray[np.int32], num_top: int) -> Scored:
        return self._backend.score(hidden, targets, num_top)

    def pool(self, hidden: Hidden, row_starts: npt.NDArray[np.int32], pooling: Pooling) -> npt.NDArray[np.float32]:
        return self._backend.pool(hidden, row_starts, pooling)

    def logits(self, hidden: Hidden) -> npt.NDArray[np.float32]:
        return self._backend.logits(hidden)

    def close(self) -> None:
        self._backend.close()
