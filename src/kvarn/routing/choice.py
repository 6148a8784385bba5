"""Which replica answers a request: pure functions of what is known at that moment.

The cost of a replica, in tokens, is what it still has to compute for others and what it would have to compute of this
prompt. A replica that holds the prefix and is busy loses this request to another when waiting there costs more than
computing again elsewhere does: it alone, while all others keep what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvarn.routing.index import PrefixMatch

DECODE_TOKENS = 32  # of load that a running answer counts as: a step of many rows computes a prompt's chunk, too
AFFINITY = 2.0  # a token that is computed again also takes a block from another prefix


@dataclass(frozen=True, slots=True)
class RoutingQuestion:
    """What a choice depends on."""

    match: PrefixMatch
    num_tokens: float  # of the prompt, estimated
    loads: Sequence[float]  # by replica, in tokens
    usable: int  # replicas as bits; not 0
    turn: int  # of all choices so far: who is first among equals


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """Where a request goes."""

    replica: int
    num_cached: int  # tokens of its prompt that lie there
    best_cached: int  # the most that any usable replica holds


Policy = Callable[[RoutingQuestion], ReplicaChoice]


def by_prefix(question: RoutingQuestion) -> ReplicaChoice:
    """The least of load and prompt tokens to compute."""
    best, chosen = (float("inf"), 0.0), ReplicaChoice(0, 0, 0)
    most = question.match.levels[0][1] if question.match.levels else 0
    # Last all of them as if they held nothing: if the least loaded holds something, no other can be better than it.
    for replicas, num_cached in (*question.match.levels, (question.usable, 0)):
        candidate = _least_loaded(question, replicas)
        if candidate is None:
            continue
        load = question.loads[candidate]
        cost = load + AFFINITY * max(0.0, question.num_tokens - num_cached), load
        if cost < best:
            best, chosen = cost, ReplicaChoice(candidate, num_cached, most)
    return chosen


def by_load(question: RoutingQuestion) -> ReplicaChoice:
    """The least loaded, whatever it holds."""
    return _choice(question, _least_loaded(question, question.usable))


def in_turns(question: RoutingQuestion) -> ReplicaChoice:
    """One after the other."""
    replicas = list(bits(question.usable))
    return _choice(question, replicas[question.turn % len(replicas)])


POLICIES: Mapping[str, Policy] = {"prefix": by_prefix, "least_loaded": by_load, "round_robin": in_turns}


def bits(replicas: int) -> Iterator[int]:
    """The numbers of replicas."""
    while replicas:
        lowest = replicas & -replicas
        yield lowest.bit_length() - 1
        replicas ^= lowest


def _least_loaded(question: RoutingQuestion, replicas: int) -> int | None:
    """The one with the least load; of equal ones another each time."""
    if not replicas:
        return None
    loads = question.loads
    if replicas == question.usable and replicas.bit_count() == len(loads):
        least, start = min(loads), question.turn % len(loads)
        try:
            return loads.index(least, start)
        except ValueError:
            return loads.index(least)
    chosen = list(bits(replicas))
    start = question.turn % len(chosen)
    return min(chosen[start:] + chosen[:start], key=loads.__getitem__)


def _choice(question: RoutingQuestion, replica: int | None) -> ReplicaChoice:
    assert replica is not None, "no replica is usable"
    most = question.match.levels[0][1] if question.match.levels else 0
    return ReplicaChoice(replica, question.match.tokens_of(replica), most)
