"""The runs of `kvarn bench fleet`: the model fitted to the real scheduler, then every policy on every size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvarn.bench.fleet.replicas import ReplicaShape
from kvarn.bench.fleet.simulation import FleetFigures, FleetSimulation
from kvarn.bench.fleet.trace import TraceRequest, TraceShape, synthetic

MAX_REAL = 16  # replicas with the real scheduler
FIT_REPLICAS, FIT_REQUESTS = 4, 800
MAX_FACTOR = 4.0

MakeTrace = Callable[[int], Iterable[TraceRequest]]  # of a number of replicas


@dataclass(frozen=True, slots=True)
class Fit:
    """The model beside the real scheduler, on one trace and with one policy."""

    shape: ReplicaShape
    real: FleetFigures
    modelled: FleetFigures


def fit(shape: ReplicaShape, make_trace: MakeTrace) -> Fit:
    """Choose the model's factor and delay so that p50 and p99 of its first tokens are those of the real scheduler."""
    trace = list(islice(make_trace(FIT_REPLICAS), FIT_REQUESTS))
    real = FleetSimulation("prefix", FIT_REPLICAS, shape, is_real=True).run(trace)
    plain = FleetSimulation("prefix", FIT_REPLICAS, shape).run(trace)
    slope = (real.ttft_p99 - real.ttft_p50) / max(1e-6, plain.ttft_p99 - plain.ttft_p50)
    factor = min(MAX_FACTOR, max(1.0, slope))
    shape = replace(shape, factor=factor)
    scaled = FleetSimulation("prefix", FIT_REPLICAS, shape).run(trace)
    shape = replace(shape, delay_s=max(0.0, real.ttft_p50 - scaled.ttft_p50))
    return Fit(shape, real, FleetSimulation("prefix", FIT_REPLICAS, shape).run(trace))


def conversations(num_requests: int, rate: float, seed: int) -> MakeTrace:
    """Traces that grow with the fleet: requests, rate and system prompts per replica; num_requests: of each replica."""

    def make(num_replicas: int) -> Iterator[TraceRequest]:
        shape = TraceShape(num_requests * num_replicas, rate * num_replicas, 4 * num_replicas + 4, seed=seed)
        return synthetic(shape)

    return make


def run_all(
    sizes: Sequence[int], policies: Sequence[str], shape: ReplicaShape, make_trace: MakeTrace, *, is_real: bool
) -> Iterator[FleetFigures]:
    """Every policy on a fleet of every size, one after the other."""
    for size in sizes:
        for policy in policies:
            yield FleetSimulation(policy, size, shape, is_real=is_real).run(make_trace(size))
