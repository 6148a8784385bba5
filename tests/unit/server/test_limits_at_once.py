"""Answers at once: who gets a place, and when those turned away are told to come again."""

from __future__ import annotations

import pytest

from kvarn.errors import InvalidParameter, RateLimited
from kvarn.server.access.account import WINDOW_S
from kvarn.server.access.limits import RateLimits
from tests.unit.server.limiting import Clock, at_once, caller, refusal, reserve


def test_retry_after_of_tokens_is_when_running_answers_end_not_when_the_minute_does(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=1000)
    for _ in range(8):  # answers of this key take 4 s and a tenth of what they reserve
        one = reserve(limits, alice, 100)
        clock.now += 4
        one.settle(10)
    clock.now += 2 * WINDOW_S
    running = reserve(limits, alice, 900)
    told_s = refusal(limits, alice, 300).retry_after_s
    assert 1 <= told_s <= 4
    clock.now += told_s
    running.settle(90)
    reserve(limits, alice, 300).settle(300)


def test_retry_after_of_tokens_is_the_minutes_where_answers_use_what_they_reserve(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=1000)
    for _ in range(8):
        one = reserve(limits, alice, 100)
        clock.now += 1
        one.settle(100)
    clock.now += 2 * WINDOW_S
    reserve(limits, alice, 900)
    assert refusal(limits, alice, 300).retry_after_s > WINDOW_S - 2


def test_at_most_so_many_run_at_once(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(concurrency=2)
    running = [reserve(limits, alice, 1) for _ in range(2)]
    error = refusal(limits, alice)
    assert (error.reason, error.retry_after_s) == ("concurrency", 1.0)
    running[0].settle(1)
    reserve(limits, alice, 1)


def test_a_request_takes_its_place_before_its_size_is_known(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(requests_per_min=2, concurrency=1)
    running = at_once(limits.enter(alice))
    with pytest.raises(RateLimited, match="at once"):
        at_once(limits.enter(alice))
    running.settle(0)
    at_once(limits.enter(alice)).settle(0)
    with pytest.raises(RateLimited, match="a minute"):
        at_once(limits.enter(alice))


def test_every_answer_takes_a_place(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(concurrency=4)
    first, second = at_once(limits.enter(alice)), at_once(limits.enter(alice))
    at_once(first.grow(10, num_answers=3))
    with pytest.raises(RateLimited, match="4 answers at once"):
        at_once(second.grow(10, num_answers=2))
    at_once(second.grow(10))
    first.settle(10)
    at_once(second.grow(10, num_answers=4))
    with pytest.raises(InvalidParameter, match="5 answers at once"):
        at_once(second.grow(10, num_answers=5))
    second.settle(0)
    assert [at_once(limits.enter(alice)).num_slots for _ in range(4)] == [1, 1, 1, 1]


def test_requests_that_computed_nothing_say_nothing_about_how_long_others_take(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(concurrency=1)
    for used in (1, 0) * 30:
        running = reserve(limits, alice, 1)
        clock.now += 20 * used
        running.settle(used)
    reserve(limits, alice, 1)
    assert refusal(limits, alice).retry_after_s == pytest.approx(10, rel=0.1)


def test_whoever_meets_long_requests_is_told_to_come_again_later(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(concurrency=1)
    for _ in range(30):
        running = reserve(limits, alice, 1)
        clock.now += 20
        running.settle(1)
    reserve(limits, alice, 1)
    assert refusal(limits, alice).retry_after_s == pytest.approx(10, rel=0.1)


def test_those_turned_away_are_told_to_come_one_after_the_other(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(concurrency=4)
    for _ in range(30):
        running = reserve(limits, alice, 1)
        clock.now += 8
        running.settle(1)
    for _ in range(4):
        reserve(limits, alice, 1)
    told = [refusal(limits, alice).retry_after_s for _ in range(40)]
    assert told[:3] == pytest.approx([4, 6, 8], rel=0.1)  # a place becomes free every two seconds
    assert told[-1] == 30  # and nobody is told to stay away for long
    clock.now += 60
    assert refusal(limits, alice).retry_after_s == pytest.approx(4, rel=0.1)
