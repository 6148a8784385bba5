"""What a request reserves of its key's tokens, and what it gives back."""

from __future__ import annotations

import pytest

from kvarn.errors import InvalidParameter, RateLimited
from kvarn.server.access.account import WINDOW_S
from kvarn.server.access.limits import RateLimits
from tests.unit.server.limiting import Clock, at_once, caller, refusal, reserve


def test_what_was_not_used_is_free_again_when_the_request_ends(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=100)
    reservation = reserve(limits, alice, 100)
    assert refusal(limits, alice).reason == "tokens"
    clock.now += 5
    reservation.settle(30)
    reserve(limits, alice, 70)
    refusal(limits, alice)


def test_four_open_ended_answers_fit_into_a_minute_that_one_context_would_fill(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=60_000, concurrency=4)
    running = [at_once(limits.enter(alice)) for _ in range(4)]
    for one in running:
        at_once(one.grow(20, open_ended=[32_000]))
    assert sum(one.num_tokens for one in running) < 3_000
    for one in running:
        one.settle(220)


def test_answers_longer_than_expected_are_counted_and_expected_the_next_time(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=60_000)
    first = at_once(limits.enter(alice))
    at_once(first.grow(20, open_ended=[32_000]))
    first.settle(20 + 20_000)
    assert first.headers["x-ratelimit-remaining-tokens"] == "39980"
    second = at_once(limits.enter(alice))
    at_once(second.grow(20, open_ended=[32_000]))
    assert second.num_tokens == 20_020
    second.settle(0)
    for _ in range(12):  # and shorter ones make it forget
        one = at_once(limits.enter(alice))
        at_once(one.grow(20, open_ended=[32_000]))
        one.settle(120)
    last = at_once(limits.enter(alice))
    at_once(last.grow(20, open_ended=[32_000]))
    assert last.num_tokens < 1_200


def test_a_cancelled_request_gives_everything_back_but_its_place_among_the_requests(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=100, requests_per_min=2, concurrency=1)
    reserve(limits, alice, 100).settle(0)
    reserve(limits, alice, 100).settle(0)
    assert refusal(limits, alice).reason == "requests"


def test_only_the_first_settlement_counts(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=100, concurrency=2)
    first, second = reserve(limits, alice, 40), reserve(limits, alice, 40)
    for _ in range(3):
        first.settle(0)
    assert first.headers["x-ratelimit-remaining-tokens"] == "60"
    reserve(limits, alice, 1)
    assert refusal(limits, alice).reason == "concurrency"  # second and the last one still run
    second.settle(40)


def test_more_than_was_reserved_is_counted_too(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=100)
    reserve(limits, alice, 10).settle(95)
    assert refusal(limits, alice, 6).reason == "tokens"


def test_more_than_was_reserved_is_counted_even_when_the_reservation_has_left_the_minute(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=100)
    reservation = reserve(limits, alice, 10)
    clock.now += WINDOW_S + 2
    reservation.settle(95)
    assert refusal(limits, alice, 16).reason == "tokens"


def test_a_request_may_take_more_while_it_runs(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=100, requests_per_min=1, concurrency=1)
    reservation = reserve(limits, alice, 40)
    clock.now += 30
    at_once(reservation.grow(50))
    assert reservation.num_tokens == 90
    reservation.settle(60)
    assert reservation.headers["x-ratelimit-remaining-tokens"] == "40"
    clock.now += 32  # the first charge leaves the window, of the second 20 were kept
    assert reservation.headers["x-ratelimit-remaining-tokens"] == "80"


def test_what_a_growing_request_has_stays_its_own_when_more_is_refused(clock: Clock) -> None:
    limits, alice, other = RateLimits(clock), caller(tokens_per_min=100), 50
    reserve(limits, alice, other)
    reservation = reserve(limits, alice, 40)
    with pytest.raises(RateLimited) as caught:
        at_once(reservation.grow(11))
    assert caught.value.reason == "tokens"
    with pytest.raises(InvalidParameter, match="101 tokens"):  # waiting would not help
        at_once(reservation.grow(61))
    assert reservation.num_tokens == 40
    assert reservation.headers["x-ratelimit-remaining-tokens"] == "10"


def test_a_request_settled_after_its_minute_changes_nothing(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=100)
    old = reserve(limits, alice, 100)
    clock.now += WINDOW_S + 2
    reserve(limits, alice, 100)
    old.settle(0)
    refusal(limits, alice)


def test_a_refused_request_takes_nothing(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(requests_per_min=10, tokens_per_min=100)
    reserve(limits, alice, 60)
    for _ in range(50):
        assert refusal(limits, alice, 60).reason == "tokens"
    reserve(limits, alice, 40)


def test_a_request_may_be_withdrawn_after_it_was_settled_and_once_only(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(requests_per_min=2, tokens_per_min=100, concurrency=1)
    reservation = reserve(limits, alice, 60)
    reservation.settle(0)
    assert reservation.num_tokens == 0
    for _ in range(3):
        reservation.withdraw()
    headers = limits.headers(alice)
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == ("2", "100")
    reserve(limits, alice, 100)


def test_bytes_are_taken_first_and_are_part_of_what_follows() -> None:
    limits, alice = RateLimits(), caller(tokens_per_min=1000, requests_per_min=9)
    one = at_once(limits.enter(alice))
    at_once(one.expect(300, 20))
    assert one.headers["x-ratelimit-remaining-tokens"] == "700"
    at_once(one.grow(400))
    assert one.headers["x-ratelimit-remaining-tokens"] == "600"
    one.use(350)
    assert one.headers["x-ratelimit-remaining-tokens"] == "650"
    one.settle()
    with pytest.raises(RateLimited):
        at_once(at_once(limits.enter(alice)).expect(651, 1))
    with pytest.raises(InvalidParameter, match="may take 1,001 tokens"):
        at_once(at_once(limits.enter(alice)).expect(1001, 1))


def test_a_refused_request_keeps_what_its_bytes_cost_and_is_no_request() -> None:
    limits, alice = RateLimits(), caller(tokens_per_min=1000, requests_per_min=9)
    one = at_once(limits.enter(alice))
    at_once(one.expect(300, 20))
    reserve(limits, alice, 600)
    with pytest.raises(RateLimited):
        at_once(one.grow(500))
    assert one.is_in_vain
    one.withdraw()
    assert limits.headers(alice)["x-ratelimit-remaining-tokens"] == "380"
    assert limits.headers(alice)["x-ratelimit-remaining-requests"] == "8"


def test_tokens_that_were_used_leave_the_place_taken_until_the_end() -> None:
    limits, alice = RateLimits(), caller(tokens_per_min=100, concurrency=1)
    one = reserve(limits, alice, 100)
    one.use(10)
    assert one.headers["x-ratelimit-remaining-tokens"] == "90"
    with pytest.raises(RateLimited, match="1 answers at once"):
        at_once(limits.enter(alice))
    one.settle()
    at_once(limits.enter(alice))
