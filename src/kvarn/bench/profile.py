"""Where the time of a row goes on the CPU: kernels by what they do, other code, and threads that wait.

The kernels are timed one by one in the core, which makes a run a little slower: shares, not speeds. All shares are of
the time of all threads, so those of a row add up to 1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.bench.model import ModelRuns, open_runs
from kvarn.bench.rows import Row
from kvarn.config import EngineConfig
from kvarn.errors import ConfigError

# What kernels do, by how their names begin.
REGIONS = {
    "products": ("matmul_",),
    "adapters": ("low_rank_",),
    "attention": ("attend_",),
    "quantising": ("quantize_row", "round_row"),
    "norms": ("rms_norm", "layer_norm"),
    "activations": ("silu_mul", "gelu", "sigmoid_mul"),
    "residual": ("add",),
    "KV writes": ("store_kv_",),
    "states": ("convolve", "delta_step", "state_step", "selective_step"),
    "choosing": ("argmax", "sum_exp", "softmax_sums"),
}
OTHER, WAITING, ALONE = "other code", "waiting", "one thread alone"


@dataclass(frozen=True, slots=True)
class RowProfile:
    """One row: shares of the time of all threads by region, largest first, and how long it took."""

    shares: dict[str, float]
    seconds: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of a model's rows went."""

    model: str
    isa: str
    threads: int
    rows: dict[Row, RowProfile]


def profile(path: Path, rows: Sequence[Row], steps: int, rounds: int, config: EngineConfig) -> Profile:
    """Load a model with timed kernels and run every row."""
    if config.backend not in {"auto", "native"}:
        raise ConfigError(f'backend is "{config.backend}"; a profile is of the CPU kernels: leave it out')
    with open_runs(path, rows, steps, config, _timed_backend) as runs:
        found = {row: _profile_row(runs, row, steps, rounds) for row in rows}
    return Profile(runs.spec.name, runs.isa, runs.threads, found)


def region_of(kernel: str) -> str:
    """What a kernel does."""
    return next(region for region, starts in REGIONS.items() if kernel.startswith(starts))


def _timed_backend(config: EngineConfig, threads: int) -> NativeBackend:
    return NativeBackend(threads, config.isa, is_timed=True)


def _profile_row(runs: ModelRuns, row: Row, steps: int, rounds: int) -> RowProfile:
    backend = runs.backend
    assert isinstance(backend, NativeBackend)
    started, before, first = time.perf_counter(), backend.ticks(), _native.ticks()
    for _ in range(rounds):
        runs.tokens_per_s(row, steps)
    last, after, seconds = _native.ticks(), backend.ticks(), time.perf_counter() - started
    in_regions, in_tasks = after[0] - before[0], after[1] - before[1]
    kernels = {name: ticks - before[2][name][1] for name, (_, ticks) in after[2].items()}
    shares = _shares(last - first, in_regions, in_tasks, kernels, runs.threads)
    return RowProfile(shares, seconds, rounds * (row.prompt or row.batch * steps))


def _shares(total: int, in_regions: int, in_tasks: int, kernels: Mapping[str, int], threads: int) -> dict[str, float]:
    """Shares of threads x total ticks.

    regions of all threads    kernels and other code in tasks | waiting for the last task, and for the first
    between them              kernels and other code of one   | one thread alone: the others have nothing
    """
    ticks = dict.fromkeys(REGIONS, 0)
    for name, spent in kernels.items():
        ticks[region_of(name)] += spent
    ticks[WAITING] = threads * in_regions - in_tasks
    ticks[ALONE] = (threads - 1) * (total - in_regions)
    ticks[OTHER] = threads * total - sum(ticks.values())
    ordered = sorted(ticks.items(), key=lambda item: -item[1])
    return {region: spent / (threads * total) for region, spent in ordered if spent > 0}
