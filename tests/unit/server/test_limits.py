"""Limits of a key over a minute, on a clock that the test sets: what is counted, told and kept."""

from __future__ import annotations

import random
import sys
import time

import pytest

from kvarn.errors import InvalidParameter, RateLimited
from kvarn.server.access.account import WINDOW_S, MinuteWindow
from kvarn.server.access.keys import ANONYMOUS
from kvarn.server.access.limits import MIN_ACCOUNTS, RateLimits
from tests.conftest import Size
from tests.unit.server.limiting import Clock, caller, refusal, reserve


def test_requests_beyond_the_minute_are_refused_until_the_first_has_left_it(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(requests_per_min=3)
    for _ in range(3):
        reserve(limits, alice, 1).settle(1)
        clock.now += 1
    error = refusal(limits, alice)
    assert error.reason == "requests"
    clock.now += error.retry_after_s - 0.01
    refusal(limits, alice)
    clock.now += 0.02
    reserve(limits, alice, 1)


def test_whoever_comes_again_when_told_to_is_let_in(clock: Clock) -> None:
    limits, alice, dice = RateLimits(clock), caller(requests_per_min=5, tokens_per_min=300), random.Random(1)
    for _ in range(300):
        num_tokens, met = dice.randint(1, 300), []
        while True:
            try:
                reserve(limits, alice, num_tokens).settle(dice.randint(0, num_tokens))
                break
            except RateLimited as error:
                met.append(error)
                clock.now += error.retry_after_s
        assert len(met) == len({error.reason for error in met})  # the other limit may be met then, but not the same
        assert all(0 < error.retry_after_s <= WINDOW_S + 1 for error in met)
        clock.now += dice.random() * 3


def test_no_minute_ever_has_more_than_the_limit(clock: Clock, size: Size) -> None:
    dice = random.Random(7)
    for _ in range(size(20, 200)):
        limit = dice.randint(1, 50)
        limits, alice = RateLimits(clock), caller(tokens_per_min=limit)
        taken: list[tuple[float, int]] = []
        for _ in range(400):
            clock.now += dice.choice([0.0, dice.random(), dice.random() * 10])
            num_tokens = dice.randint(1, limit)
            try:
                reserve(limits, alice, num_tokens)
            except RateLimited:
                continue
            taken.append((clock.now, num_tokens))
            last_minute = sum(amount for at, amount in taken if at > clock.now - WINDOW_S)
            assert last_minute <= limit


def test_keys_do_not_see_each_other(clock: Clock) -> None:
    limits = RateLimits(clock)
    alice, bob = caller("alice", requests_per_min=1), caller("bob", requests_per_min=1)
    reserve(limits, alice, 1)
    reserve(limits, bob, 1)
    refusal(limits, alice)


def test_what_could_never_fit_is_refused_as_a_wrong_request(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=100)
    with pytest.raises(InvalidParameter, match=r"101.*100"):
        reserve(limits, alice, 101)


def test_the_headers_tell_limit_rest_and_reset(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(requests_per_min=5, tokens_per_min=1000)
    headers = reserve(limits, alice, 250).headers
    assert headers == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "750",
        "x-ratelimit-reset-tokens": "1m1s",
    }
    clock.now += 60.5
    assert limits.headers(alice)["x-ratelimit-reset-tokens"] == "500ms"
    clock.now += 1
    assert limits.headers(alice)["x-ratelimit-remaining-requests"] == "5"
    assert limits.headers(alice)["x-ratelimit-reset-requests"] == "0ms"


def test_a_refusal_carries_the_headers_too(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(requests_per_min=1)
    reserve(limits, alice, 1)
    error = refusal(limits, alice)
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    assert "tokens" not in "".join(error.headers)


def test_a_tier_without_limits_has_no_headers_and_refuses_nobody(clock: Clock) -> None:
    limits = RateLimits(clock)
    for _ in range(5_000):
        reservation = reserve(limits, ANONYMOUS, 10**9)
    assert reservation.headers == {}


@pytest.mark.parametrize("jump", [-1e9, -3600.0, -0.5])
def test_a_clock_that_goes_back_neither_frees_nor_locks(clock: Clock, jump: float) -> None:
    limits, alice = RateLimits(clock), caller(requests_per_min=2)
    began = clock.now
    reserve(limits, alice, 1)
    clock.now = began + jump
    reserve(limits, alice, 1)
    assert refusal(limits, alice).retry_after_s <= WINDOW_S + 1
    clock.now = began + WINDOW_S + 1.01
    reserve(limits, alice, 1)


def test_a_clock_that_leaps_ahead_begins_a_new_minute(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(requests_per_min=1)
    running = reserve(limits, alice, 1)
    clock.now += 1e12
    reserve(limits, alice, 1)
    running.settle(1)
    refusal(limits, alice)


def test_the_clock_by_default_is_the_one_nobody_can_set() -> None:
    assert RateLimits().now() == pytest.approx(time.monotonic(), abs=5)


def test_a_changed_tier_counts_from_the_next_request_on(clock: Clock) -> None:
    limits = RateLimits(clock)
    reserve(limits, caller(requests_per_min=1), 1)
    reserve(limits, caller(requests_per_min=2), 1)
    refusal(limits, caller(requests_per_min=2))


def test_many_keys_leave_little_behind(clock: Clock) -> None:
    limits = RateLimits(clock)
    for number in range(20 * MIN_ACCOUNTS):
        reserve(limits, caller(f"k{number}", requests_per_min=5, tokens_per_min=50), 1).settle(1)
        clock.now += 0.1
    assert limits.num_accounts <= 2 * MIN_ACCOUNTS


def test_the_size_of_a_window_does_not_depend_on_the_traffic(clock: Clock) -> None:
    window = MinuteWindow(10**9)
    for _ in range(100_000):
        clock.now += 0.01
        window.charge(1, clock.now)
    assert len(window._buckets) <= WINDOW_S + 2
    assert sys.getsizeof(window._buckets) < 10_000
    assert window.total <= 6_200
