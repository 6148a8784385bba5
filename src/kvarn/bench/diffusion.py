"""What caches and parallel acceptance give a diffusion model: the same answer's length, denoised in several ways.

Every way fills a whole canvas at temperature 0 without an early end, so a token is a token. `full` recomputes
everything for every token, as the published loops do.
"""

from __future__ import annotations

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
    """What is asked: one prompt, one length, one block."""

    prompt_tokens: int = 128
    tokens: int = 256
    block: int = 32
    threshold: float = 0.9
    rounds: int = 1

    def params(self, way: str) -> SamplingParams:
        diffusion = DiffusionParams(
            block_length=self.block, threshold=self.threshold, canvas="fixed", **self._ways()[way]
        )
        return SamplingParams(temperature=0.0, max_tokens=self.tokens, ignore_eos=True, diffusion=diffusion)

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(self._ways())

    def _ways(self) -> dict[str, dict[str, Any]]:
        every: dict[str, Any] = {"steps": self.tokens}
        return {
            FULL: every | {"cache": "none"},
            "threshold": {"cache": "none", "policy": "threshold"},
            "prefix": every | {"cache": "prefix"},
            "dual": every | {"cache": "dual"},
            "sparse": every | {"sparse": SPARSE},
            "dual+threshold": {"cache": "dual", "policy": "threshold"},
            "sparse+threshold": {"sparse": SPARSE, "policy": "threshold"},
        }


@dataclass
class ForwardCounts:
    """What the backend was asked for while one way ran."""

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
class NeighbourCost:
    """Autoregressive requests of another model beside as many diffusing ones."""

    requests: int
    alone_tokens_per_s: float
    beside_tokens_per_s: float
    was_busy: bool  # until the end: otherwise the figure flatters

    @property
    def share(self) -> float:
        return self.beside_tokens_per_s / self.alone_tokens_per_s


@dataclass(frozen=True, slots=True)
class CrowdCost:
    """Several requests at once against one alone."""

    requests: int
    tokens_per_s: float
    gain: float  # over one alone
    slowest: float  # answer against the mean


def measure_way(llm: LLM, plan: DiffusionBench, way: str, prompt: Sequence[int]) -> WayCost:
    """Denoise one answer, in each round anew, and keep the fastest."""
    found = [_measure_round(llm, plan, way, prompt) for _ in range(plan.rounds)]
    return min(found, key=lambda cost: cost.seconds)


def measure_lengths(llm: LLM, plan: DiffusionBench, lengths: Sequence[int]) -> dict[int, dict[str, float]]:
    """Give each cache's time for answers of these lengths, over the time of recomputing everything."""
    found = {}
    for length in lengths:
        own = replace(plan, tokens=length)
        prompt = random_prompt(llm, own)
        full = measure_way(llm, own, FULL, prompt).seconds
        found[length] = {way: measure_way(llm, own, way, prompt).seconds / full for way in CACHES}
    return found


def _measure_round(llm: LLM, plan: DiffusionBench, way: str, prompt: Sequence[int]) -> WayCost:
    counts = ForwardCounts()
    with observed(llm.runner, counts):
        started, cpu_started = time.perf_counter(), time.process_time()
        done = llm.generate(list(prompt), plan.params(way))
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    outside = float(np.mean(counts.outside)) if counts.outside else 0.0
    return WayCost(way, _num_tokens([done], plan), seconds, counts.steps, counts.rows, outside, cpu_s)


def measure_crowd(llm: LLM, plan: DiffusionBench, requests: int, alone: WayCost) -> CrowdCost:
    """Denoise different prompts at once, in the way that one alone was."""
    prompts = [random_prompt(llm, plan, seed) for seed in range(requests)]
    started = time.perf_counter()
    completions = llm.generate(prompts, plan.params(alone.way))
    seconds = time.perf_counter() - started
    rate = _num_tokens(completions, plan) / seconds
    took = [completion.timings.first_token_s + completion.timings.decode_s for completion in completions]
    return CrowdCost(requests, rate, rate / alone.tokens_per_s, max(took) / (sum(took) / len(took)))


def measure_neighbours(
    llm: LLM, plan: DiffusionBench, other: LLM, requests: int = 8, tokens: int = 64
) -> NeighbourCost:
    """Decode with an autoregressive model alone, and while this one denoises in the same process."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [random_prompt(other, DiffusionBench(prompt_tokens=16), seed) for seed in range(requests)]

    def decode() -> float:
        started = time.perf_counter()
        other.generate(prompts, params)
        return requests * tokens / (time.perf_counter() - started)

    alone = max(decode() for _ in range(2))
    handles = [llm.submit(random_prompt(llm, plan, seed), plan.params("dual+threshold")) for seed in range(requests)]
    beside = decode()
    was_busy = any(not handle._ticket.is_settled for handle in handles)
    for handle in handles:
        handle.cancel()
    return NeighbourCost(requests, alone, beside, was_busy)


def _num_tokens(completions: Sequence[Completion], plan: DiffusionBench) -> int:
    counts = [len(completion.token_ids) for completion in completions]
    if any(count != plan.tokens for count in counts):
        raise ConfigError(f"an answer has {min(counts)} of {plan.tokens} tokens; the context or the cache is too small")
    return sum(counts)


def random_prompt(llm: LLM, plan: DiffusionBench, seed: int = 0) -> list[int]:
    """Tokens of the vocabulary's common part."""
    vocab = llm.spec.vocab_size
    ids: list[int] = np.random.default_rng(seed).integers(vocab // 10, vocab // 2, plan.prompt_tokens).tolist()
    return ids


def require_diffusion(llm: LLM) -> MaskedDiffusion:
    """Refuse models whose tokens do not all see each other."""
    generation = llm.spec.generation
    if not isinstance(generation, MaskedDiffusion) or generation.block is not None:
        raise ConfigError(
            f"{llm.spec.name} is no full-attention diffusion model; try `kvarn bench make llada-small Q4_0`"
        )
    return generation


def backend_of(llm: LLM) -> Backend:
    return llm.runner.ask(lambda engine: engine.backend).result()


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """A block's step against a long canvas, all of it and the half that was kept; its own keys alone are subtracted."""

    context: int
    dual_ms: float
    sparse_ms: float

    @property
    def ratio(self) -> float:
        return self.sparse_ms / self.dual_ms


def measure_attention(llm: LLM, plan: DiffusionBench, context: int = LONG_CONTEXT, rounds: int = 7) -> AttentionCost:
    """Time the backend alone: what a block pays for the keys outside it."""
    return llm.runner.exclusively(
        lambda engine: _LongCanvas(engine, plan.block, context, llm.runner.beat).measure(rounds), 2 * context
    )


class _LongCanvas:
    """A canvas in the engine's cache with the kept half of it beside."""

    def __init__(self, engine: Engine, block: int, context: int, beat: Callable[[], None]) -> None:
        self._engine = engine
        self._context = context
        self._start = context // 2 // block * block
        self._end = self._start + block
        self._num_kept = int(SPARSE.retention_ratio * (context - block))
        self._beat = beat

    def measure(self, rounds: int) -> AttentionCost:
        kv, block = self._engine.kv, self._end - self._start
        names = {"bench-own": self._context, "bench-kept": self._num_kept + block, "bench-alone": block}
        try:
            for name, length in names.items():
                if kv.extend(name, length) is None:
                    raise ConfigError(f"the KV cache has no room for {sum(names.values()):,} tokens; give a larger one")
            own, kept, alone = pad_tables([kv.block_ids(name) for name in names])
            self._fill(own, kept[: -(-names["bench-kept"] // kv.block_size)])
            shifts = (0, self._start - self._num_kept, self._start)
            steps = zip((own, kept, alone), names.values(), shifts, strict=True)
            dual, sparse, bare = (self._time(self._block(*step), rounds) for step in steps)
        finally:
            for name in names:
                kv.release(name)
        return AttentionCost(self._context, 1000 * (dual - bare), 1000 * (sparse - bare))

    def _fill(self, own: Any, kept: Any) -> None:
        keep = Keep(0, self._start, self._end, self._num_kept, kept, SPARSE.head_select, SPARSE.pool_kernel)
        self._engine.backend.forward(self._batch(0, self._context, own, self._context, keep=(keep,)))
        self._beat()

    def _block(self, table: Any, length: int, shift: int) -> Batch:
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
