"""What a key may take: a moving minute, reservations that are settled once, and a clock that may do anything."""

from __future__ import annotations

import random
import sys
import time

import pytest

from kvarn.errors import InvalidParameter, RateLimited
from kvarn.server.access.account import WINDOW_S, MinuteWindow
from kvarn.server.access.keys import ANONYMOUS, Principal
from kvarn.server.access.limits import MIN_ACCOUNTS, RateLimits, Reservation
from kvarn.server.access.tiers import Tier
from tests.conftest import Size


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def caller(name: str = "alice", **limits: int) -> Principal:
    return Principal(name, Tier("test", **limits), name)  # type: ignore[arg-type]


def reserve(limits: RateLimits, principal: Principal, num_tokens: int) -> Reservation:
    """What a call does: enter, then take what it may take; one that is refused gives its place back."""
    reservation = limits.enter(principal)
    try:
        reservation.grow(num_tokens)
    except (RateLimited, InvalidParameter):
        reservation.withdraw()
        raise
    return reservation


def refusal(limits: RateLimits, principal: Principal, num_tokens: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        reserve(limits, principal, num_tokens)
    return caught.value


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
    running = [limits.enter(alice) for _ in range(4)]
    for one in running:
        one.grow(20, open_ended=[32_000])
    assert sum(one.num_tokens for one in running) < 3_000
    for one in running:
        one.settle(220)


def test_answers_longer_than_expected_are_counted_and_expected_the_next_time(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=60_000)
    first = limits.enter(alice)
    first.grow(20, open_ended=[32_000])
    first.settle(20 + 20_000)
    assert first.headers["x-ratelimit-remaining-tokens"] == "39980"
    second = limits.enter(alice)
    second.grow(20, open_ended=[32_000])
    assert second.num_tokens == 20_020
    second.settle(0)
    for _ in range(12):  # and shorter ones make it forget
        one = limits.enter(alice)
        one.grow(20, open_ended=[32_000])
        one.settle(120)
    last = limits.enter(alice)
    last.grow(20, open_ended=[32_000])
    assert last.num_tokens < 1_200


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
    reservation.grow(50)
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
        reservation.grow(11)
    assert caught.value.reason == "tokens"
    with pytest.raises(InvalidParameter, match="101 tokens"):  # waiting would not help
        reservation.grow(61)
    assert reservation.num_tokens == 40
    assert reservation.headers["x-ratelimit-remaining-tokens"] == "10"


def test_a_request_settled_after_its_minute_changes_nothing(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(tokens_per_min=100)
    old = reserve(limits, alice, 100)
    clock.now += WINDOW_S + 2
    reserve(limits, alice, 100)
    old.settle(0)
    refusal(limits, alice)


def test_at_most_so_many_run_at_once(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(concurrency=2)
    running = [reserve(limits, alice, 1) for _ in range(2)]
    error = refusal(limits, alice)
    assert (error.reason, error.retry_after_s) == ("concurrency", 1.0)
    running[0].settle(1)
    reserve(limits, alice, 1)


def test_a_request_takes_its_place_before_its_size_is_known(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(requests_per_min=2, concurrency=1)
    running = limits.enter(alice)
    with pytest.raises(RateLimited, match="at once"):
        limits.enter(alice)
    running.settle(0)
    limits.enter(alice).settle(0)
    with pytest.raises(RateLimited, match="a minute"):
        limits.enter(alice)


def test_every_answer_takes_a_place(clock: Clock) -> None:
    limits, alice = RateLimits(clock), caller(concurrency=4)
    first, second = limits.enter(alice), limits.enter(alice)
    first.grow(10, num_answers=3)
    with pytest.raises(RateLimited, match="4 answers at once"):
        second.grow(10, num_answers=2)
    second.grow(10)
    first.settle(10)
    second.grow(10, num_answers=4)
    with pytest.raises(InvalidParameter, match="5 answers at once"):
        second.grow(10, num_answers=5)
    second.settle(0)
    assert [limits.enter(alice).num_slots for _ in range(4)] == [1, 1, 1, 1]


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


def test_bytes_are_taken_first_and_are_part_of_what_follows() -> None:
    limits, alice = RateLimits(), caller(tokens_per_min=1000, requests_per_min=9)
    one = limits.enter(alice)
    one.expect(300, 20)
    assert one.headers["x-ratelimit-remaining-tokens"] == "700"
    one.grow(400)
    assert one.headers["x-ratelimit-remaining-tokens"] == "600"
    one.use(350)
    assert one.headers["x-ratelimit-remaining-tokens"] == "650"
    one.settle()
    with pytest.raises(RateLimited):
        limits.enter(alice).expect(651, 1)
    with pytest.raises(InvalidParameter, match="may take 1,001 tokens"):
        limits.enter(alice).expect(1001, 1)


def test_a_refused_request_keeps_what_its_bytes_cost_and_is_no_request() -> None:
    limits, alice = RateLimits(), caller(tokens_per_min=1000, requests_per_min=9)
    one = limits.enter(alice)
    one.expect(300, 20)
    reserve(limits, alice, 600)
    with pytest.raises(RateLimited):
        one.grow(500)
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
        limits.enter(alice)
    one.settle()
    limits.enter(alice)
