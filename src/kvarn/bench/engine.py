"""What the engine costs on top of its backend: the same decode steps through the whole engine and driven by hand.

A step's period runs from one forward to the next, so it holds everything: scheduling, choosing, text, events, the
runner and whatever Python does in between. Overhead is what of it the backend did not take.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvarn.backends.batch import Batch, RowSampling, SampleRows
from kvarn.backends.protocol import Backend
from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.engine.handle import OutputCollector
from kvarn.engine.scheduling.plan import pad_tables
from kvarn.engine.submission import Submission
from kvarn.errors import ConfigError
from kvarn.types import SamplingParams

PROMPT_TOKENS = 32
TEMPERATURE, TOP_P = 0.7, 0.95


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Medians over the steps of the best round, in each of which every request decodes one token."""

    requests: int
    num_steps: int
    step_ms: float
    backend_ms: float
    straight_ms: float  # the period of a bare loop around the backend

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
        """Of what the bare loop reaches."""
        return self.straight_ms / self.step_ms


def measure(client: EngineClient, vocab_size: int, requests: int, num_steps: int, rounds: int = 3) -> EngineCost:
    """Run both ways in turn and take the best round of each: other processes can only make a step slower."""
    found = [_measure_round(client, vocab_size, requests, num_steps, seed) for seed in range(rounds)]
    through = [clock for clock, _ in found]
    best = min(through, key=lambda clock: clock.step_s)
    straight_s = min(clock.step_s for _, clock in found)
    num_timed = sum(len(clock.periods) for clock in through)
    return EngineCost(requests, num_timed, 1000 * best.step_s, 1000 * best.backend_s, 1000 * straight_s)


def _measure_round(
    client: EngineClient, vocab_size: int, requests: int, num_steps: int, seed: int
) -> tuple[StepClock, StepClock]:
    through, by_hand = StepClock(), StepClock()
    prompts = _prompts(vocab_size, requests, seed=1000 * requests + seed)
    backend = client.call(lambda engine: engine.backend).result()
    with through.watching(backend, requests, num_steps) as is_enough:
        _run_engine(client, prompts, is_enough)
    with by_hand.watching(backend, requests, num_steps):
        client.compute(lambda engine: _run_straight(engine, prompts, num_steps, client.offer_turn)).result()
    if not through.periods:
        raise ConfigError(f"the KV cache is too small for {requests} requests at once; give fewer or a larger one")
    return through, by_hand


@dataclass
class StepClock:
    """Times forward and sample of full decode steps; both lists have one entry per step, in seconds."""

    periods: list[float] = field(default_factory=list)
    backend: list[float] = field(default_factory=list)
    _begun_at: float | None = None  # of a full step whose period is not over
    _busy: float = 0.0

    @property
    def step_s(self) -> float:
        return statistics.median(self.periods)

    @property
    def backend_s(self) -> float:
        return statistics.median(self.backend)

    @contextmanager
    def watching(self, backend: Backend, num_rows: int, num_steps: int) -> Iterator[threading.Event]:
        """Look at every call of one backend until num_steps full steps, of num_rows decoding rows each, were timed."""
        forward, sample = backend.forward, backend.sample
        self._begun_at = None
        is_enough, goal = threading.Event(), len(self.periods) + num_steps

        def timed_forward(batch: Batch) -> Any:
            started = time.perf_counter()
            self._begin(started if len(batch.token_ids) == len(batch.output_rows) == num_rows else None, started)
            if len(self.periods) == goal:
                is_enough.set()
            hidden = forward(batch)
            self._busy += time.perf_counter() - started
            return hidden

        def timed_sample(hidden: Any, rows: SampleRows) -> Any:
            started = time.perf_counter()
            sampled = sample(hidden, rows)
            self._busy += time.perf_counter() - started
            return sampled

        vars(backend).update(forward=timed_forward, sample=timed_sample)
        try:
            yield is_enough
        finally:
            del vars(backend)["forward"], vars(backend)["sample"]

    def _begin(self, step: float | None, now: float) -> None:
        if self._begun_at is not None and step is not None:
            self.periods.append(now - self._begun_at)
            self.backend.append(self._busy)
        self._begun_at, self._busy = step, 0.0


def _prompts(vocab_size: int, count: int, seed: int) -> list[list[int]]:
    ids = np.random.default_rng(seed).integers(vocab_size // 10, vocab_size // 2, (count, PROMPT_TOKENS))
    rows: list[list[int]] = ids.tolist()
    return rows


def _run_engine(client: EngineClient, prompts: Sequence[Sequence[int]], is_enough: threading.Event) -> None:
    """All requests at once, until enough steps had all of them decoding."""
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
    """The same batch without an engine: forward, sample, put the tokens into the next batch."""
    names = [f"bench-{i}" for i in range(len(prompts))]
    total = PROMPT_TOKENS + num_steps + 1
    try:
        for name in names:
            if engine.kv.extend(name, total) is None:
                raise ConfigError(f"the KV cache has no room for {len(prompts)} x {total} tokens; measure less at once")
        tables = pad_tables([engine.kv.block_ids(name) for name in names])
        tokens = np.array([_prefill(engine.backend, p, t) for p, t in zip(prompts, tables, strict=True)], np.int32)
        for step in range(num_steps + 1):
            tokens = _decode(engine.backend, tokens, PROMPT_TOKENS + step, tables)
            beat()
    finally:
        for name in names:
            engine.kv.release(name)


def _prefill(backend: Backend, prompt: Sequence[int], table: Any) -> int:
    count = len(prompt)
    batch = Batch(
        token_ids=np.array(prompt, np.int32),
        positions=np.arange(count, dtype=np.int32),
        row_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=table[None],
        output_rows=np.array([count - 1], np.int32),
    )
    return int(backend.sample(backend.forward(batch), _rows(1, count)).token_ids[0])


def _decode(backend: Backend, tokens: Any, position: int, tables: Any) -> Any:
    count = len(tokens)
    batch = Batch(
        token_ids=tokens,
        positions=np.full(count, position, np.int32),
        row_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, position + 1, np.int32),
        block_tables=tables,
        output_rows=np.arange(count, dtype=np.int32),
    )
    return backend.sample(backend.forward(batch), _rows(count, position + 1)).token_ids


def _rows(count: int, position: int) -> SampleRows:
    row = RowSampling(temperature=TEMPERATURE, top_p=TOP_P, seed=1, position=position)
    return SampleRows(np.arange(count, dtype=np.int32), (row,) * count)
