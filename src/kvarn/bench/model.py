"""How fast a model runs: each row's batches driven straight into a backend, sampling included.

No engine, no text and no server: `kvarn bench engine` and `kvarn bench serve` say what those add.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch, KVLayout, RowSampling, SampleRows
from kvarn.backends.protocol import Backend
from kvarn.backends.select import block_size, device_memory, device_weights, kv_dtype, make_backend, require_support
from kvarn.bench.limits import Limits, Work, measure_limits, work_of
from kvarn.bench.rows import Row, Samples
from kvarn.config import EngineConfig
from kvarn.errors import ConfigError, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.machine import choose_threads, warn_of_excess_threads
from kvarn.models.describe import describe
from kvarn.models.spec import Encoder, ModelSpec

Int32 = npt.NDArray[np.int32]
OnProgress = Callable[[int, int], None]
MakeBackend = Callable[[EngineConfig, int], Backend]


@dataclass(frozen=True, slots=True)
class ModelBench:
    """What is measured, and how often."""

    rows: tuple[Row, ...]
    rounds: int = 5
    steps: int = 32  # of one sequence or batch in one round


@dataclass(frozen=True, slots=True)
class Figures:
    """One model on this machine."""

    spec: ModelSpec
    isa: str
    threads: int
    work: Work
    limits: Limits | None
    samples: dict[Row, Samples]


def measure(path: Path, bench: ModelBench, config: EngineConfig, progress: OnProgress | None = None) -> Figures:
    """Load a model, measure every row once per round, and this machine's limits at the end."""
    speeds: dict[Row, list[float]] = {row: [] for row in bench.rows}
    with open_runs(path, bench.rows, bench.steps, config) as runs:
        for done in range(bench.rounds):
            for row in bench.rows:
                speeds[row].append(runs.tokens_per_s(row, bench.steps))
            if progress is not None:
                progress(done + 1, bench.rounds)
    limits = measure_limits(runs.threads, runs.isa or None) if runs.isa else None  # they are the CPU kernels'
    samples = {row: Samples(tuple(found)) for row, found in speeds.items()}
    return Figures(runs.spec, runs.isa, runs.threads, runs.work, limits, samples)


@dataclass(frozen=True, slots=True)
class ModelRuns:
    """A loaded model whose KV cache holds the cached tokens of each row."""

    backend: Backend
    spec: ModelSpec
    threads: int
    isa: str
    work: Work
    runs: dict[Row, _Run]

    def tokens_per_s(self, row: Row, steps: int) -> float:
        """Measure a row once; steps at most those it was opened for."""
        return self.runs[row].tokens_per_s(steps)

    def __enter__(self) -> ModelRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()


def open_runs(
    path: Path, rows: Sequence[Row], max_steps: int, config: EngineConfig, make: MakeBackend = make_backend
) -> ModelRuns:
    """Load a model and compute the cached tokens of every row."""
    warn_of_excess_threads(config.threads)
    threads = config.threads or choose_threads().count
    backend = make(config, threads)
    source = open_weights(path)
    try:
        description = describe(source)
        spec = description.spec
        if isinstance(spec.generation, Encoder):
            raise UnsupportedModel(f"{spec.name!r} generates no text; choose another model to measure")
        require_support(backend, spec)
        weights = device_weights(spec, description.weights, config)
        backend.load(spec, weights)
        layers = tuple((b.attention.num_kv_heads, b.attention.head_dim) for b in spec.blocks)
        layout = KVLayout(block_size(config), layers, kv_dtype(config))
        tables = _tables(spec, layout, rows, max_steps)
        _reserve(backend, layout, tables, config)
        runs = {row: _prepare(backend, spec, row, tables[row]) for row in rows}
        work = work_of(spec, weights, layout)
        return ModelRuns(backend, spec, threads, getattr(backend, "isa", ""), work, runs)
    except BaseException:
        backend.close()
        raise
    finally:
        source.close()


def _tables(spec: ModelSpec, layout: KVLayout, rows: Sequence[Row], max_steps: int) -> dict[Row, Int32]:
    """Separate blocks for every row, so that no row overwrites another's cached tokens."""
    tables, first = {}, 0
    for row in rows:
        longest = row.prompt or row.depth + 1 + max_steps
        if longest > spec.context_length:
            text = f"{row.name} needs {longest:,} tokens, {spec.name!r} has {spec.context_length:,}"
            raise ConfigError(f"{text}; choose other rows, or a model of a longer context")
        tables[row] = block_table(row, longest, layout.block_size) + np.int32(first)
        first = int(tables[row].max()) + 1
    return tables


def _reserve(backend: Backend, layout: KVLayout, tables: dict[Row, Int32], config: EngineConfig) -> None:
    budget = (max(int(table.max()) for table in tables.values()) + 1) * layout.block_bytes
    if budget > device_memory(config).num_bytes:
        raise ConfigError(f"the rows need {budget:,} bytes of cache, more than is free; choose fewer with --row")
    backend.reserve_kv(layout, budget)


def block_table(row: Row, num_tokens: int, block_size: int) -> Int32:
    """(sequences, blocks), numbered from 0; the whole blocks of a shared prefix are the same in every sequence."""
    sequences = row.batch or 1
    blocks = -(-num_tokens // block_size)
    shared = row.depth // block_size if row.is_shared else 0
    private = np.arange(sequences * (blocks - shared), dtype=np.int32).reshape(sequences, -1) + np.int32(shared)
    return np.hstack([np.tile(np.arange(shared, dtype=np.int32), (sequences, 1)), private])


@dataclass(frozen=True, slots=True)
class _Run:
    backend: Backend
    row: Row
    table: Int32
    prompt: Int32
    chunk: int  # tokens of one forward

    def tokens_per_s(self, steps: int) -> float:
        """Measure once."""
        started = time.perf_counter()
        if self.row.is_prefill:
            self.fill(0)
            num_tokens = self.row.prompt
        else:
            self._decode(steps)
            num_tokens = self.row.batch * steps
        return num_tokens / (time.perf_counter() - started)

    def fill(self, sequence: int) -> None:
        """Compute the prompt of one sequence, chunk by chunk, and sample the token after it."""
        total = len(self.prompt)
        for begin in range(0, total, self.chunk):
            end = min(begin + self.chunk, total)
            rows = [end - begin - 1] if end == total else []
            hidden = self.backend.forward(
                Batch(
                    token_ids=self.prompt[begin:end],
                    positions=np.arange(begin, end, dtype=np.int32),
                    row_starts=np.array([0, end - begin], np.int32),
                    context_lens=np.array([end], np.int32),
                    block_tables=self.table[sequence : sequence + 1],
                    output_rows=np.array(rows, np.int32),
                )
            )
        self.backend.sample(hidden, _greedy(1))

    def _decode(self, steps: int) -> None:
        count, row = self.row.batch, self.row
        tokens = np.resize(self.prompt, count).astype(np.int32)
        rows, starts = np.arange(count, dtype=np.int32), np.arange(count + 1, dtype=np.int32)
        for position in range(row.depth, row.depth + steps):
            batch = Batch(
                token_ids=tokens,
                positions=np.full(count, position, np.int32),
                row_starts=starts,
                context_lens=np.full(count, position + 1, np.int32),
                block_tables=self.table,
                output_rows=rows,
            )
            tokens = self.backend.sample(self.backend.forward(batch), _greedy(count)).token_ids


def _prepare(backend: Backend, spec: ModelSpec, row: Row, table: Int32) -> _Run:
    """Everything that is not timed: compute the cached tokens, and run once to warm up."""
    rng = np.random.default_rng(row.prompt + row.batch + row.depth)
    size = row.prompt or row.depth or 1
    prompt = rng.integers(spec.vocab_size // 10, spec.vocab_size // 2, size).astype(np.int32)
    run = _Run(backend, row, table, prompt, EngineConfig().max_batch_tokens)
    if row.depth:
        for sequence in range(1 if row.is_shared else row.batch):  # shared prefixes are whole blocks
            run.fill(sequence)
    run.tokens_per_s(2)
    return run


def _greedy(count: int) -> SampleRows:
    return SampleRows(np.arange(count, dtype=np.int32), (RowSampling(),) * count)
