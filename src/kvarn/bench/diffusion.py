"""What caches and parallel acceptance give a diffusion model: the same answer's length, denoised in several ways.

Every way fills a whole canvas at temperature 0 without an early end, so a token is a token. `full` recomputes
everything for every token, as the published loops do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvarn.backends.batch import Batch, Keep
from kvarn.backends.protocol import Backend
from kvarn.bench.observed_backend import observed
from kvarn.diffusion import DiffusionParams, SparseConfig
from kvarn.engine.engine import Engine
from kvarn.engine.scheduling.plan import pad_tables
from kvarn.errors import ConfigError
from kvarn.llm import LLM
from kvarn.models.spec import MaskedDiffusion
from kvarn.types import Completion, SamplingParams

SPARSE = SparseConfig(retention_ratio=0.5, delay_step=0)
LONG_CONTEXT = 2048
FULL = "full"
CACHES = ("prefix", "dual", "sparse")


@dataclass(frozen=True, slots=True)
class DiffusionBench:
    """What is measured: one prompt length, one answer length, one block length."""

    prompt_tokens: int = 128
    tokens: int = 256
    block: int = 32
    threshold: float = 0.9
    rounds: int = 1

    def params(self, way: str) -> SamplingParams:
        diffusion = DiffusionParams(block_length=self.block, canvas="fixed", **self._ways()[way])
        return SamplingParams(temperature=0.0, max_tokens=self.tokens, ignore_eos=True, diffusion=diffusion)

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(self._ways())

    def _ways(self) -> dict[str, dict[str, Any]]:
        every: dict[str, Any] = {"steps": self.tokens}
        sure: dict[str, Any] = {"policy": "threshold", "threshold": self.threshold}
        return {
            FULL: every | {"cache": "none"},
            "threshold": sure | {"cache": "none"},
            "prefix": every | {"cache": "prefix"},
            "dual": every | {"cache": "dual"},
            "sparse": every | {"sparse": SPARSE},
            "dual+threshold": sure | {"cache": "dual"},
            "sub_block+threshold": sure | {"cache": "sub_block", "sub_block_length": math.gcd(self.block, 8)},
            "sparse+threshold": sure | {"sparse": SPARSE},
        }


@dataclass
class ForwardCounts:
    """Forward passes and rows of the backend during one run."""

    steps: int = 0
    rows: int = 0
    outside: list[int] = field(default_factory=list)  # keys read that the step did not compute, of steps with less rows

    def forward_begins(self, batch: Batch, _: float) -> None:
        self.steps += 1
        self.rows += len(batch.token_ids)
        computed = np.diff(batch.row_starts)
        self.outside += [int(n) for n in batch.context_lens - computed if n > 0]

    def call_ended(self, _: float) -> None:
        """Only counts are kept."""


@dataclass(frozen=True, slots=True)
class WayCost:
    """The best round of one way."""

    way: str
    tokens: int
    seconds: float
    steps: int
    rows: int
    outside_keys: float  # mean of the steps that read any
    cpu_s: float  # of all threads: says more than the clock where other processes run

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class ColocationCost:
    """Decode speed of another, autoregressive model while as many diffusion requests run in the same process."""

    requests: int
    alone_tokens_per_s: float
    beside_tokens_per_s: float
    was_busy: bool  # diffusion requests ran until the end; otherwise the figure is too good

    @property
    def share(self) -> float:
        return self.beside_tokens_per_s / self.alone_tokens_per_s


@dataclass(frozen=True, slots=True)
class ConcurrencyCost:
    """Several concurrent requests against one alone."""

    requests: int
    tokens_per_s: float
    gain: float  # over one alone
    slowest: float  # answer against the mean


def measure_way(llm: LLM, bench: DiffusionBench, way: str, prompt: Sequence[int]) -> WayCost:
    """Denoise one answer, in each round anew, and keep the fastest."""
    found = [_measure_round(llm, bench, way, prompt) for _ in range(bench.rounds)]
    return min(found, key=lambda cost: cost.seconds)


def measure_lengths(llm: LLM, bench: DiffusionBench, lengths: Sequence[int]) -> dict[int, dict[str, float]]:
    """Give each cache's time for answers of these lengths, over the time of recomputing everything."""
    found = {}
    for length in lengths:
        resized = replace(bench, tokens=length)
        prompt = random_prompt(llm, resized)
        full = measure_way(llm, resized, FULL, prompt).seconds
        found[length] = {way: measure_way(llm, resized, way, prompt).seconds / full for way in CACHES}
    return found


def _measure_round(llm: LLM, bench: DiffusionBench, way: str, prompt: Sequence[int]) -> WayCost:
    counts = ForwardCounts()
    with observed(llm.client, counts):
        started, cpu_started = time.perf_counter(), time.process_time()
        done = llm.generate(list(prompt), bench.params(way))
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    outside = float(np.mean(counts.outside)) if counts.outside else 0.0
    return WayCost(way, _num_tokens([done], bench), seconds, counts.steps, counts.rows, outside, cpu_s)


def measure_concurrent(llm: LLM, bench: DiffusionBench, requests: int, alone: WayCost) -> ConcurrencyCost:
    """Denoise different prompts concurrently, in the same way as the single request."""
    prompts = [random_prompt(llm, bench, seed) for seed in range(requests)]
    started = time.perf_counter()
    completions = llm.generate(prompts, bench.params(alone.way))
    seconds = time.perf_counter() - started
    rate = _num_tokens(completions, bench) / seconds
    took = [completion.timings.first_token_s + completion.timings.decode_s for completion in completions]
    return ConcurrencyCost(requests, rate, rate / alone.tokens_per_s, max(took) / (sum(took) / len(took)))


def measure_colocated(
    llm: LLM, bench: DiffusionBench, other: LLM, requests: int = 8, tokens: int = 64
) -> ColocationCost:
    """Decode with an autoregressive model alone, and while this one denoises in the same process."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [random_prompt(other, DiffusionBench(prompt_tokens=16), seed) for seed in range(requests)]

    def decode() -> float:
        started = time.perf_counter()
        other.generate(prompts, params)
        return requests * tokens / (time.perf_counter() - started)

    alone = max(decode() for _ in range(2))
    handles = [llm.submit(random_prompt(llm, bench, seed), bench.params("dual+threshold")) for seed in range(requests)]
    beside = decode()
    was_busy = any(not handle._collector.is_settled for handle in handles)
    for handle in handles:
        handle.cancel()
    return ColocationCost(requests, alone, beside, was_busy)


def _num_tokens(completions: Sequence[Completion], bench: DiffusionBench) -> int:
    counts = [len(completion.token_ids) for completion in completions]
    if any(count != bench.tokens for count in counts):
        raise ConfigError(
            f"an answer has {min(counts)} of {bench.tokens} tokens; the context or the cache is too small"
        )
    return sum(counts)


def random_prompt(llm: LLM, bench: DiffusionBench, seed: int = 0) -> list[int]:
    """Random ids from the common part of the vocabulary."""
    vocab = llm.spec.vocab_size
    ids: list[int] = np.random.default_rng(seed).integers(vocab // 10, vocab // 2, bench.prompt_tokens).tolist()
    return ids


def require_diffusion(llm: LLM) -> MaskedDiffusion:
    """Refuse models without full attention."""
    generation = llm.spec.generation
    if not isinstance(generation, MaskedDiffusion) or generation.block is not None:
        raise ConfigError(
            f"{llm.spec.name} is no full-attention diffusion model; try `kvarn bench make llada-small Q4_0`"
        )
    return generation


def backend_of(llm: LLM) -> Backend:
    return llm.client.call(lambda engine: engine.backend).result()


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """A block's step against all keys of a long canvas and against the retained half, less the block's own keys."""

    context: int
    dual_ms: float
    sparse_ms: float

    @property
    def ratio(self) -> float:
        return self.sparse_ms / self.dual_ms


def measure_attention(llm: LLM, bench: DiffusionBench, context: int = LONG_CONTEXT, rounds: int = 7) -> AttentionCost:
    """Time the backend alone: what a block's step costs for the keys outside the block."""
    return llm.client.compute(
        lambda engine: _LongCanvas(engine, bench.block, context, engine.offer_turn).measure(rounds), 2 * context
    ).result()


class _LongCanvas:
    """A canvas in the engine's cache, and a second sequence with the retained half of it."""

    def __init__(self, engine: Engine, block: int, context: int, beat: Callable[[], None]) -> None:
        self._engine = engine
        self._context = context
        self._start = context // 2 // block * block
        self._end = self._start + block
        self._num_kept = int(SPARSE.retention_ratio * (context - block))
        self._beat = beat

    def measure(self, rounds: int) -> AttentionCost:
        kv, block = self._engine.kv, self._end - self._start
        lengths = {"bench-full": self._context, "bench-kept": self._num_kept + block, "bench-alone": block}
        try:
            for name, length in lengths.items():
                if kv.extend(name, length) is None:
                    raise ConfigError(
                        f"the KV cache has no room for {sum(lengths.values()):,} tokens; give a larger one"
                    )
            full, kept, alone = pad_tables([kv.block_ids(name) for name in lengths])
            self._fill(full, kept[: -(-lengths["bench-kept"] // kv.block_size)])
            shifts = (0, self._start - self._num_kept, self._start)
            steps = zip((full, kept, alone), lengths.values(), shifts, strict=True)
            dual, sparse, bare = (self._time(self._block_step(*step), rounds) for step in steps)
        finally:
            for name in lengths:
                kv.release(name)
        return AttentionCost(self._context, 1000 * (dual - bare), 1000 * (sparse - bare))

    def _fill(self, full: Any, kept: Any) -> None:
        keep = Keep(0, self._start, self._end, self._num_kept, kept, SPARSE.head_select, SPARSE.pool_kernel)
        self._engine.backend.forward(self._batch(0, self._context, full, self._context, keep=(keep,)))
        self._beat()

    def _block_step(self, table: Any, length: int, shift: int) -> Batch:
        return self._batch(self._start, self._end, table, length, slot_shifts=np.array([shift], np.int32))

    def _batch(self, start: int, end: int, table: Any, length: int, **more: Any) -> Batch:
        return Batch(
            token_ids=np.arange(start, end, dtype=np.int32) % 100,
            positions=np.arange(start, end, dtype=np.int32),
            row_starts=np.array([0, end - start], np.int32),
            context_lens=np.array([length], np.int32),
            block_tables=table[None],
            output_rows=np.zeros(1, np.int32),
            **more,
        )

    def _time(self, batch: Batch, rounds: int) -> float:
        took = []
        for _ in range(rounds):
            started = time.perf_counter()
            self._engine.backend.forward(batch)
            took.append(time.perf_counter() - started)
            self._beat()
        return min(took)
