"""What the engine costs on top of its backend: the same decode steps through the whole engine and by a bare loop.

A step's period runs from one forward to the next, so it includes everything: scheduling, sampling, detokenisation,
events, the client and whatever Python does in between. Overhead is the part that was not spent in the backend.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.backends.batch import Batch, RowSampling, SampleRows
from kvarn.backends.protocol import Backend
from kvarn.bench.observed_backend import observed
from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.engine.handle import OutputCollector
from kvarn.engine.scheduling.plan import pad_tables, pad_window_tables
from kvarn.engine.submission import Submission
from kvarn.errors import ConfigError
from kvarn.formats.open import open_weights
from kvarn.kv.cache import KVCache
from kvarn.models.describe import describe
from kvarn.models.memory_plan import CACHE_TOKENS, kv_token_bytes
from kvarn.types import SamplingParams

PROMPT_TOKENS = 32
EARLY_TOKENS = 256  # that the first requests may make while the prompts of the last are computed
TEMPERATURE, TOP_P = 0.7, 0.95


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Medians over the steps of the best round; every request decodes one token in each."""

    requests: int
    num_steps: int
    step_ms: float
    backend_ms: float
    straight_ms: float  # the period of a bare loop that drives the backend

    @property
    def overhead_ms(self) -> float:
        return self.step_ms - self.backend_ms

    @property
    def overhead_share(self) -> float:
        return self.overhead_ms / self.step_ms

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.requests / self.step_ms

    @property
    def straight_tokens_per_s(self) -> float:
        return 1000 * self.requests / self.straight_ms

    @property
    def throughput_share(self) -> float:
        """Throughput as a share of the bare loop's."""
        return self.straight_ms / self.step_ms


def measure(client: EngineClient, vocab_size: int, requests: int, num_steps: int, rounds: int = 3) -> EngineCost:
    """Measure engine and bare loop in turn and take the best round of each: other processes only make steps slower."""
    found = [_measure_round(client, vocab_size, requests, num_steps, seed) for seed in range(rounds)]
    engine_clocks = [clock for clock, _ in found]
    best = min(engine_clocks, key=lambda clock: clock.step_s)
    straight_s = min(clock.step_s for _, clock in found)
    num_timed = sum(len(clock.periods) for clock in engine_clocks)
    return EngineCost(requests, num_timed, 1000 * best.step_s, 1000 * best.backend_s, 1000 * straight_s)


def kv_bytes(path: Path, requests: int, num_steps: int) -> int | None:
    """What so many requests need at once, where that may be more than a cache has by default."""
    num_tokens = requests * (PROMPT_TOKENS + num_steps + EARLY_TOKENS)
    if num_tokens <= CACHE_TOKENS:
        return None
    source = open_weights(path)
    try:
        spec = describe(source).spec
        return max(num_tokens, spec.context_length) * kv_token_bytes(spec)
    finally:
        source.close()


def _measure_round(
    client: EngineClient, vocab_size: int, requests: int, num_steps: int, seed: int
) -> tuple[StepClock, StepClock]:
    through_engine, straight = StepClock(requests, num_steps), StepClock(requests, num_steps)
    prompts = _prompts(vocab_size, requests, seed=1000 * requests + seed)
    with observed(client, through_engine):
        _run_engine(client, prompts, through_engine.is_enough)
    with observed(client, straight):
        client.compute(lambda engine: _run_straight(engine, prompts, num_steps, engine.offer_turn)).result()
    if not through_engine.periods:
        raise ConfigError(f"the KV cache is too small for {requests} requests at once; give fewer or a larger one")
    return through_engine, straight


@dataclass
class StepClock:
    """Times full decode steps, of num_rows decoding rows each; both lists have one entry per step, in seconds."""

    num_rows: int
    num_steps: int
    periods: list[float] = field(default_factory=list)
    backend: list[float] = field(default_factory=list)
    is_enough: threading.Event = field(default_factory=threading.Event)  # num_steps were timed
    _step_started: float | None = None  # of a full step whose period is not over
    _busy_s: float = 0.0

    @property
    def step_s(self) -> float:
        return statistics.median(self.periods)

    @property
    def backend_s(self) -> float:
        return statistics.median(self.backend)

    def forward_begins(self, batch: Batch, now: float) -> None:
        is_full = len(batch.token_ids) == len(batch.output_rows) == self.num_rows
        if self._step_started is not None and is_full:
            self.periods.append(now - self._step_started)
            self.backend.append(self._busy_s)
        self._step_started, self._busy_s = now if is_full else None, 0.0
        if len(self.periods) == self.num_steps:
            self.is_enough.set()

    def call_ended(self, seconds: float) -> None:
        self._busy_s += seconds


def _prompts(vocab_size: int, count: int, seed: int) -> list[list[int]]:
    ids = np.random.default_rng(seed).integers(vocab_size // 10, vocab_size // 2, (count, PROMPT_TOKENS))
    rows: list[list[int]] = ids.tolist()
    return rows


def _run_engine(client: EngineClient, prompts: Sequence[Sequence[int]], is_enough: threading.Event) -> None:
    """Submit all requests at once and wait until enough steps had all of them decoding."""
    params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, ignore_eos=True, seed=1)
    collectors = [OutputCollector() for _ in prompts]
    handles = client.submit_all([Submission(prompt, params) for prompt in prompts], *collectors)
    collectors[0].done.add_done_callback(lambda _: is_enough.set())  # a cache too small for them, or a failure
    is_enough.wait()
    for handle in handles:
        handle.cancel()
    for handle in handles:
        handle.result()


def _run_straight(engine: Engine, prompts: Sequence[Sequence[int]], num_steps: int, beat: Callable[[], None]) -> None:
    """Drive the same batch without an engine: forward, sample, put the tokens into the next batch."""
    names = [f"bench-{i}" for i in range(len(prompts))]
    total = PROMPT_TOKENS + num_steps + 1
    try:
        for name in names:
            if engine.kv.extend(name, total) is None:
                raise ConfigError(f"the KV cache has no room for {len(prompts)} x {total} tokens; measure less at once")
        tokens = np.array([_prefill(engine, p, name) for p, name in zip(prompts, names, strict=True)], np.int32)
        tables = _tables(engine.kv, names)
        for step in range(num_steps + 1):
            tokens = _decode(engine.backend, tokens, PROMPT_TOKENS + step, tables)
            beat()
    finally:
        for name in names:
            engine.kv.release(name)


def _tables(kv: KVCache, names: Sequence[str]) -> dict[str, Any]:
    """The fields of a batch that say where its sequences lie."""
    windows = pad_window_tables([kv.window_ids(name) for name in names])
    return {"block_tables": pad_tables([kv.block_ids(name) for name in names]), "window_tables": windows}


def _prefill(engine: Engine, prompt: Sequence[int], name: str) -> int:
    backend, count = engine.backend, len(prompt)
    batch = Batch(
        token_ids=np.array(prompt, np.int32),
        positions=np.arange(count, dtype=np.int32),
        row_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        output_rows=np.array([count - 1], np.int32),
        **_tables(engine.kv, [name]),
    )
    return int(backend.sample(backend.forward(batch), _rows(1, count)).token_ids[0])


def _decode(backend: Backend, tokens: Any, position: int, tables: dict[str, Any]) -> Any:
    count = len(tokens)
    batch = Batch(
        token_ids=tokens,
        positions=np.full(count, position, np.int32),
        row_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, position + 1, np.int32),
        output_rows=np.arange(count, dtype=np.int32),
        **tables,
    )
    return backend.sample(backend.forward(batch), _rows(count, position + 1)).token_ids


def _rows(count: int, position: int) -> SampleRows:
    row = RowSampling(temperature=TEMPERATURE, top_p=TOP_P, seed=1, position=position)
    return SampleRows(np.arange(count, dtype=np.int32), (row,) * count)
