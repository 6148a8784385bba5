"""A fleet in simulated time: the real router and real caches, every request of a trace, and what came of it.

Events lie in one heap by time: arrivals, what replicas do next, and what they tell the router a moment later.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvarn.bench.fleet.engines import EngineReplica
from kvarn.bench.fleet.history import HistoryRouter
from kvarn.bench.fleet.replicas import Job, ModelledReplica, ReplicaShape, SimulatedReplica
from kvarn.bench.fleet.trace import TraceRequest
from kvarn.routing.feed import FeedFrame, ReplicaIdentity
from kvarn.routing.fleet import Fleet, RoutedRequest
from kvarn.routing.text_prefix import TextPrefix

FEED_S = 0.025  # until a router knows what a replica has told
IDENTITY = ReplicaIdentity("simulated", {})
HASH_KEY = b"fleet".ljust(32, b"\0")
TEXT_TREE = "text_tree"
POLICY_NAMES = ("prefix", TEXT_TREE, "least_loaded", "round_robin")
ARRIVAL, REPLICA, FEED = range(3)


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """One policy on one trace. Times in seconds, costs in microseconds of this machine's CPU."""

    policy: str
    replicas: int
    requests: int
    hit_rate: float  # of prompt tokens
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    ttft_mean: float
    spread: float  # the most requests that one replica had, over the mean
    choice_us: float
    feed_us: float  # per request
    index_blocks: int
    simulated_s: float


@dataclass(slots=True)
class _Tally:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    choice_s: float = 0.0
    feed_s: float = 0.0
    first_tokens: list[float] = field(default_factory=list)


class _FleetRouter:
    """The real router's library."""

    def __init__(self, policy: str, replicas: Sequence[SimulatedReplica], clock: Callable[[], float]) -> None:
        self.fleet = Fleet([str(number) for number in range(len(replicas))], policy, clock)
        self.is_told = policy == "prefix"
        self._replicas = replicas
        self._all = (1 << len(replicas)) - 1
        for number in range(len(replicas)):
            self.fleet.greet(number, IDENTITY)
            self.tell(number)

    def choose(self, prefix: TextPrefix) -> tuple[int, RoutedRequest]:
        return self.fleet.route(prefix, self._all)

    def tell(self, number: int) -> None:
        replica = self._replicas[number]
        assert replica.kv.journal is not None
        is_all, changes = replica.kv.journal.take()
        self.fleet.hear(number, FeedFrame("ready", replica.load, tuple(changes), is_all))

    def answer(self, job: Job) -> None:
        assert isinstance(job.routed, RoutedRequest)
        self.fleet.answer(job.routed)

    def end(self, job: Job) -> None:
        assert isinstance(job.routed, RoutedRequest)
        self.fleet.end(job.routed)


class _TreeRouter:
    """The other kind, told nothing."""

    is_told = False

    def __init__(self, num_replicas: int, num_texts: int) -> None:
        self._tree = HistoryRouter(num_replicas, num_texts)

    def choose(self, prefix: TextPrefix) -> tuple[int, None]:
        return self._tree.choose(prefix), None

    def tell(self, number: int) -> None:
        """It does not listen."""

    def answer(self, job: Job) -> None:
        """All that counts is the end."""

    def end(self, job: Job) -> None:
        self._tree.end(job.replica)


class FleetSimulation:
    """One policy before num_replicas replicas. is_real: with the real scheduler."""

    def __init__(self, policy: str, num_replicas: int, shape: ReplicaShape, *, is_real: bool = False) -> None:
        self._policy = policy
        self._now = 0.0
        kind = EngineReplica if is_real else ModelledReplica
        self.replicas: list[SimulatedReplica] = [kind(shape, HASH_KEY) for _ in range(num_replicas)]
        self._router: _FleetRouter | _TreeRouter
        if policy == TEXT_TREE:
            self._router = _TreeRouter(num_replicas, num_replicas * shape.num_blocks)
        else:
            self._router = _FleetRouter(policy, self.replicas, lambda: self._now)
        self._events: list[tuple[float, int, int, int]] = []  # time, kind, number, ...
        self._planned = [float("inf")] * num_replicas
        self._is_telling = bytearray(num_replicas)
        self._counts = [0] * num_replicas
        self._tally = _Tally()

    def run(self, trace: Iterable[TraceRequest]) -> FleetFigures:
        """All requests of a trace, to the end of the last."""
        num_requests = 0
        for number, request in enumerate(trace):
            self._run_until(request.at)
            self._now = request.at
            self._submit(Job(request, request.prefix(), number))
            num_requests += 1
        self._run_until(float("inf"))
        return self._figures(num_requests)

    def _submit(self, job: Job) -> None:
        began = time.thread_time()
        number, job.routed = self._router.choose(job.prefix)
        self._tally.choice_s += time.thread_time() - began
        job.replica = number
        self._counts[number] += 1
        self.replicas[number].submit(job, self._now)
        self._plan(number)

    def _run_until(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, kind, number, _ = heapq.heappop(self._events)
            if kind == FEED:
                self._is_telling[number] = False
                began = time.thread_time()
                self._router.tell(number)
                self._tally.feed_s += time.thread_time() - began
            elif self._planned[number] == self._now:  # else it was planned anew
                self._planned[number] = float("inf")
                for job in self.replicas[number].advance(self._now):
                    self._note(job)
                self._plan(number)

    def _plan(self, number: int) -> None:
        at = self.replicas[number].next_at
        if at is not None and at < self._planned[number]:
            self._planned[number] = max(at, self._now)
            heapq.heappush(self._events, (self._planned[number], REPLICA, number, 0))

    def _note(self, job: Job) -> None:
        if job.ended_at is None:
            tally, request = self._tally, job.request
            assert job.first_at is not None
            tally.first_tokens.append(job.first_at - request.at)
            tally.prompt_tokens += sum(count for _, count in request.pieces)
            tally.cached_tokens += job.num_cached
            self._router.answer(job)
        else:
            self._router.end(job)
        if self._router.is_told and not self._is_telling[job.replica]:
            self._is_telling[job.replica] = True
            heapq.heappush(self._events, (self._now + FEED_S, FEED, job.replica, 0))

    def _figures(self, num_requests: int) -> FleetFigures:
        tally, router = self._tally, self._router
        p50, p90, p99 = np.percentile(tally.first_tokens, [50, 90, 99]).tolist()
        return FleetFigures(
            policy=self._policy,
            replicas=len(self.replicas),
            requests=num_requests,
            hit_rate=tally.cached_tokens / max(1, tally.prompt_tokens),
            ttft_p50=p50,
            ttft_p90=p90,
            ttft_p99=p99,
            ttft_mean=float(np.mean(tally.first_tokens)),
            spread=max(self._counts) * len(self._counts) / max(1, num_requests),
            choice_us=1e6 * tally.choice_s / max(1, num_requests),
            feed_us=1e6 * tally.feed_s / max(1, num_requests),
            index_blocks=router.fleet.index.num_blocks if isinstance(router, _FleetRouter) else 0,
            simulated_s=self._now,
        )


def as_json(figures: FleetFigures) -> dict[str, Any]:
    """Rounded, for a report."""
    values = {name: getattr(figures, name) for name in FleetFigures.__slots__}
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in values.items()}
