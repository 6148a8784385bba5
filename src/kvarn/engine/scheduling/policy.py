"""Which request starts first and which is preempted: pure rules over requests; nothing else decides either.

All requests age at the same rate, so ageing is part of a key that never changes while a request waits: what counts is
its time of arrival. One level of priority is worth ageing_s seconds of waiting, so no request starves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvarn.config import EngineConfig
from kvarn.engine.scheduling.queue import Key, KeyOf
from kvarn.request import Request

SecondsFor = Callable[[int], float]  # prompt tokens -> seconds it takes to compute them


class Policy(Protocol):
    """What the scheduler asks."""

    def order(self, request: Request) -> Key:
        """The request with the smallest key starts first."""

    def is_background(self, request: Request, top_priority: int, now: float) -> bool:
        """Whether a running request counts as lower than the highest priority that runs."""

    def victim(self, running: Iterable[Request]) -> Request:
        """The request to preempt when blocks run out."""

    def may_displace(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may take the place of a running one."""


@dataclass(frozen=True, slots=True)
class AgeingPolicy:
    """One order for the queue; ageing and preemption are the same for all of them."""

    order: KeyOf
    ageing_s: float

    def is_background(self, request: Request, top_priority: int, now: float) -> bool:
        aged = request.priority + math.floor((now - request.submitted_at) / self.ageing_s)
        return aged < top_priority

    def victim(self, running: Iterable[Request]) -> Request:
        """Lowest level, then least progress, then youngest.

        Levels never change and answers only grow, so while no token is chosen the order stands still: the last one in
        it keeps its blocks, computes its prompt and goes on. That is why preemption cannot cycle.
        """
        return min(running, key=lambda request: (self._level(request), request.num_output, -request.number))

    def may_displace(self, waiting: Request, running: Request) -> bool:
        return waiting.priority > running.priority and self._level(waiting) > self._level(running)

    def _level(self, request: Request) -> int:
        """Priority, and one less for each ageing_s that a request came later."""
        return request.priority - math.floor(request.submitted_at / self.ageing_s)


def make_policy(config: EngineConfig, seconds_for: SecondsFor) -> Policy:
    """The policy a configuration names; seconds_for estimates the time of a prompt, for `slo`."""
    ageing_s = config.ageing_s
    orders: dict[str, KeyOf] = {
        "fcfs": fcfs,
        "priority": lambda request: priority(request, ageing_s),
        "shortest_remaining": lambda request: shortest_remaining(request, ageing_s),
        "slo": lambda request: slo(request, ageing_s, seconds_for),
    }
    return AgeingPolicy(orders[config.policy], ageing_s)


def fcfs(request: Request) -> Key:
    """First come, first served."""
    return (request.submitted_at,)


def priority(request: Request, ageing_s: float) -> Key:
    """Highest priority first; a level is worth ageing_s of waiting."""
    return (request.submitted_at - request.priority * ageing_s,)


def shortest_remaining(request: Request, ageing_s: float) -> Key:
    """Fewest tokens left first; each ageing_s of waiting counts as half of them done."""
    return (math.log2(max(1, request.num_remaining)) + request.submitted_at / ageing_s,)


def slo(request: Request, ageing_s: float, seconds_for: SecondsFor) -> Key:
    """Least slack first: the target time of the first token, less the time its prompt takes.

    A request without slo_ms counts as one of ageing_s; one that has its first token queues by its time of arrival.
    """
    if request.first_token_at is not None:
        return (request.submitted_at,)
    target_s = ageing_s if request.params.slo_ms is None else request.params.slo_ms / 1000.0
    return (request.submitted_at + target_s - seconds_for(len(request.prompt_ids)),)
