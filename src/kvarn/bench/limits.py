"""The roofline of this machine: memory read and 8-bit products a second, measured, and the ceiling they imply.

A step cannot take less time than reading its weights and its cache once, nor less than the products of its matrices.
Attention's own arithmetic is left out: it is not done in 8 bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from kvarn.backends.batch import KVLayout
from kvarn.backends.native.tensors import matrix_names
from kvarn.backends.select import has_native
from kvarn.bench.rows import Row
from kvarn.formats.weights import WeightSource
from kvarn.machine import available_memory
from kvarn.models.spec import MixtureOfExperts, ModelSpec

READ_BYTES = 512 << 20  # larger than the last-level cache of the machines we know
Bound = Literal["memory", "arithmetic"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of all threads together."""

    threads: int
    table: str  # of kernels whose instructions made the products
    read_gbps: float
    dot_gops: float  # two operations for each product


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The roofline's bound: no implementation that reads these weights can be faster."""

    tokens_per_s: float
    bound: Bound


def measure_limits(threads: int, table: str | None = None, seconds: float = 0.04, rounds: int = 20) -> Limits | None:
    """The best of many short rounds, since other processes can only take away; None without the compiled core."""
    if not has_native():
        return None
    from kvarn.backends.native._native import kernels

    table = table or kernels.tables()[0]
    size = min(READ_BYTES, available_memory().num_bytes // 8) // threads
    parts = [np.ones(size, np.uint8) for _ in range(threads)]  # written, so that the pages exist
    with ThreadPoolExecutor(threads) as pool:
        reads = [partial(kernels.read_rate, part, seconds) for part in parts]
        dots = [partial(kernels.dot_rate, table, seconds)] * threads
        read = max(_aggregate_rate(pool, reads, seconds) for _ in range(rounds))
        dot = max(_aggregate_rate(pool, dots, seconds) for _ in range(rounds))
    return Limits(threads, table, round(read / 1e9, 2), round(dot / 1e9, 1))


def _aggregate_rate(pool: ThreadPoolExecutor, probes: Sequence[Callable[[], float]], seconds: float) -> float:
    """Sum of the rates over wall-clock time: a probe that ran alone while another waited does not count as faster."""
    started = time.perf_counter()
    rates: list[float] = list(pool.map(lambda probe: probe(), probes))
    return sum(rates) * seconds / (time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and weights of one model per step, whatever runs it."""

    layer_bytes: float  # of matrices, as stored
    layer_values: float  # weights a token is multiplied with
    head_bytes: float
    head_values: float
    token_bytes: float  # of K and V
    experts: MixtureOfExperts | None = None

    def ceiling(self, row: Row, limits: Limits) -> Ceiling:
        """The rate at which one of the limits is reached, tokens a second."""
        tokens = row.prompt or row.batch
        heads = row.batch or 1
        sequences = 1 if row.is_shared else row.batch
        bytes_read = self._bytes_touched(tokens) + self.head_bytes + sequences * row.depth * self.token_bytes
        operations = 2 * (tokens * self.layer_values + heads * self.head_values)
        read_s = bytes_read / (limits.read_gbps * 1e9)
        dot_s = operations / (limits.dot_gops * 1e9)
        return Ceiling(tokens / max(read_s, dot_s), "memory" if read_s >= dot_s else "arithmetic")

    def _bytes_touched(self, tokens: int) -> float:
        """Of matrices read in a step; of experts as if every token was routed to others, up to all of them."""
        if self.experts is None:
            return self.layer_bytes
        return self.layer_bytes * min(1.0, tokens * self.experts.num_active / self.experts.num_experts)


def work_of(spec: ModelSpec, weights: WeightSource, layout: KVLayout) -> Work:
    """Count bytes and weights of a model's matrices."""
    head = "output.weight" if spec.head is not None and not spec.head.tied else "token_embd.weight"
    layers = [weights.tensors[name] for name in matrix_names(spec) if name not in ("token_embd.weight", head)]
    info = weights.tensors[head]
    mixtures = [b.feed_forward for b in spec.blocks if isinstance(b.feed_forward, MixtureOfExperts)]
    experts = mixtures[0] if mixtures else None
    share = experts.num_active / experts.num_experts if experts else 1.0
    return Work(
        layer_bytes=sum(t.num_bytes for t in layers),
        layer_values=sum(t.num_values * (share if len(t.shape) == 3 else 1.0) for t in layers),
        head_bytes=info.num_bytes,
        head_values=info.num_values,
        token_bytes=layout.token_bytes,
        experts=experts,
    )
