"""Who starts first, who gives way, and that nobody starves."""

from __future__ import annotations

import pytest

from kvarn.config import POLICIES, EngineConfig
from kvarn.engine.scheduling.policy import Policy, make_policy
from kvarn.request import Request
from kvarn.types import SamplingParams
from tests.submitting import new_request

AGEING_S = 10.0


def make_request(at: float, *, num_prompt: int = 4, **params: object) -> Request:
    sampling = SamplingParams(**{"max_tokens": 8, **params})  # type: ignore[arg-type]
    total = num_prompt + (sampling.max_tokens or 0)
    return new_request(f"at {at}", (1,) * num_prompt, sampling, total, 0, clock=lambda: at, number=int(at * 1000))


def policy(name: str) -> Policy:
    return make_policy(EngineConfig(policy=name, ageing_s=AGEING_S), lambda num_tokens: num_tokens * 0.1)


def starts_first(name: str, *requests: Request) -> Request:
    return min(requests, key=policy(name).order)


def test_fcfs_goes_by_arrival_whatever_the_priority() -> None:
    early, late = make_request(1.0), make_request(2.0, priority=100)
    assert starts_first("fcfs", early, late) is early


def test_priority_goes_by_priority_then_arrival() -> None:
    low, high, later = make_request(1.0), make_request(2.0, priority=1), make_request(3.0, priority=1)
    assert starts_first("priority", low, high, later) is high


def test_shortest_remaining_prefers_the_request_with_less_to_do() -> None:
    long, short = make_request(1.0, max_tokens=100), make_request(2.0, max_tokens=10)
    assert starts_first("shortest_remaining", long, short) is short


def test_slo_prefers_the_least_slack() -> None:
    relaxed, urgent = make_request(1.0, slo_ms=9000), make_request(2.0, slo_ms=2000)
    assert starts_first("slo", relaxed, urgent) is urgent


def test_slo_counts_the_time_that_the_prompt_will_take() -> None:
    short, long = make_request(1.0, slo_ms=5000), make_request(1.5, slo_ms=5000, num_prompt=20)
    assert starts_first("slo", short, long) is long


def test_slo_leaves_requests_without_a_wish_to_ageing() -> None:
    without, urgent = make_request(1.0), make_request(2.0, slo_ms=100)
    assert starts_first("slo", without, urgent) is urgent
    assert starts_first("slo", without, make_request(1.0 + AGEING_S, slo_ms=500)) is without


@pytest.mark.parametrize("name", POLICIES)
def test_whoever_has_waited_long_enough_starts_before_any_newcomer(name: str) -> None:
    """The worst case of each policy: an endless stream of requests it likes better."""
    old = make_request(0.0, priority=-3, max_tokens=64)
    newcomer = make_request(7 * AGEING_S, priority=3, max_tokens=1, slo_ms=0)
    assert starts_first(name, old, newcomer) is old


def test_the_victim_has_the_lowest_priority_then_the_least_progress() -> None:
    low, behind, ahead = make_request(1.0, priority=-1), make_request(2.0), make_request(1.5)
    for request, num_tokens in ((low, 7), (behind, 1), (ahead, 3)):
        for _ in range(num_tokens):
            request.append(1)
    chosen = policy("fcfs")
    assert chosen.victim([ahead, low, behind]) is low
    assert chosen.victim([ahead, behind]) is behind


def test_the_youngest_of_equals_gives_way() -> None:
    assert policy("fcfs").victim([old := make_request(1.0), young := make_request(2.0)]) is young
    assert policy("fcfs").victim([old]) is old


def test_age_protects_from_being_the_victim() -> None:
    old, new = make_request(0.0, priority=0), make_request(3 * AGEING_S, priority=2)
    assert policy("priority").victim([old, new]) is new


def test_only_a_higher_priority_displaces_and_age_protects_from_that_too() -> None:
    chosen = policy("priority")
    assert chosen.may_displace(make_request(2.0, priority=1), make_request(1.0))
    assert not chosen.may_displace(make_request(1.0), make_request(30.0))
    assert not chosen.may_displace(make_request(30.0, priority=1), make_request(1.0))


def test_a_low_priority_leaves_the_background_when_it_has_aged() -> None:
    chosen, request = policy("priority"), make_request(1.0)
    assert chosen.is_background(request, top_priority=2, now=2.0)
    assert not chosen.is_background(request, top_priority=2, now=1.0 + 2 * AGEING_S)
    assert not chosen.is_background(request, top_priority=0, now=2.0)
