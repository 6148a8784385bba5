"""Limits counted in a real Redis over several replicas: exact while it answers, and never more without it."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvarn.errors import InvalidParameter, LimitsUnavailable, RateLimited
from kvarn.server.access.keys import ANONYMOUS
from kvarn.server.access.reservation import Reservation
from kvarn.server.access.shared.store import TIMEOUT_S
from tests.conftest import Record, Size
from tests.redis_server import RedisServer, require_redis
from tests.server.sharing import QUICK, Replica, race, replicas, until
from tests.unit.server.limiting import caller

WITHIN_S = 0.3  # an answer while Redis hangs
NUM_PROCESSES = 4


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    require_redis()
    with RedisServer() as redis:
        yield redis


@pytest.fixture
def redis(server: RedisServer) -> Iterator[RedisServer]:
    """Empty, and running whatever a test did to it before."""
    server.thaw()
    if server.process.poll() is not None:
        server.start()
    server.command("FLUSHALL")
    yield server
    server.thaw()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def enter_all(among: list[Replica], number: int, **limits: int) -> list[Reservation]:
    """So many requests of one key at once, spread over replicas: those that were admitted."""
    alice = caller(**limits)
    entered = await asyncio.gather(*(among[index % len(among)].enter(alice) for index in range(number)))
    return [one for one in entered if one is not None]


async def enter_often(among: list[Replica], number: int, **limits: int) -> list[Reservation]:
    """All that are ever admitted: on a busy machine some of so many calls at once are too late for Redis."""
    entered = []
    for _ in range(10):
        entered += await enter_all(among, number, **limits)
        await all_back(among)
    return entered


async def all_back(among: list[Replica]) -> None:
    await until(lambda: not any(one.observer.is_away for one in among))


def test_of_400_racing_requests_with_room_for_50_exactly_50_enter(redis: RedisServer) -> None:
    spawn = multiprocessing.get_context("spawn")
    begin, counts = spawn.Barrier(NUM_PROCESSES), spawn.Queue()
    racing = [
        spawn.Process(target=race, args=(redis.port, 400 // NUM_PROCESSES, begin, counts)) for _ in range(NUM_PROCESSES)
    ]
    for one in racing:
        one.start()
    entered = [counts.get(timeout=60) for _ in racing]
    for one in racing:
        one.join(60)
    assert sum(entered) == 50
    assert max(entered) < 50  # it was a race


@pytest.mark.parametrize(("limit", "reason"), [("requests_per_min", "requests"), ("concurrency", "concurrency")])
def test_the_limit_is_met_over_all_replicas(redis: RedisServer, limit: str, reason: str) -> None:
    async def test() -> None:
        async with replicas(redis, 3) as three:
            assert len(await enter_all(three, 60, **{limit: 20})) == 20
            for one in three:
                with pytest.raises(RateLimited) as caught:
                    await one.limits.enter(caller(**{limit: 20}))
                assert caught.value.reason == reason
                assert 0 < caught.value.retry_after_s <= 61

    run(test)


def test_what_was_not_used_is_free_for_all_and_places_come_back(redis: RedisServer) -> None:
    async def test() -> None:
        alice = caller(tokens_per_min=1000, concurrency=1)
        async with replicas(redis, 2) as (one, other):
            taken = await one.limits.enter(alice)
            await taken.grow(900)
            assert await other.enter(alice) is None
            taken.settle(100)
            await until(lambda: not one.limits._flushes)
            again = await other.limits.enter(alice)
            with pytest.raises(RateLimited, match="1,000 tokens a minute"):
                await again.grow(901)
            with pytest.raises(InvalidParameter, match="may take 1,001 tokens"):
                await again.grow(1001)
            await again.grow(900)
            assert other.left(alice, "tokens") == 0
            again.withdraw()
            assert other.left(alice, "tokens") == 900

    run(test)


def test_tiers_without_limits_are_counted_nowhere(redis: RedisServer) -> None:
    async def test() -> None:
        async with replicas(redis, 1) as (one,):
            for _ in range(10):
                reservation = await one.limits.enter(ANONYMOUS)
                await reservation.grow(10**6)
                reservation.settle(10**6)
            assert one.observer.seconds == []
            assert reservation.headers == {}

    run(test)


def test_a_frozen_redis_delays_nobody_and_opens_nothing(redis: RedisServer, record: Record, patience: float) -> None:
    async def test() -> None:
        async with replicas(redis, 3, TIMEOUT_S) as three:
            before = len(await enter_all(three[:1], 10, requests_per_min=50))  # all on one of them
            await asyncio.sleep(5 * QUICK.beat_s)  # which the others hear of, and that it is over
            redis.freeze()
            waits = []

            async def ask(replica: Replica) -> Reservation | None:
                began = time.monotonic()
                entered = await replica.enter(caller(requests_per_min=50))
                waits.append(time.monotonic() - began)
                return entered

            entered = await asyncio.gather(*(ask(three[index % 3]) for index in range(300)))
            total = before + sum(one is not None for one in entered)
            record("limits-frozen-redis", {"longest_wait_s": max(waits), "admitted": total, "limit": 50})
            assert max(waits) < WITHIN_S * patience
            assert total == 50
            assert all(one.observer.is_away and one.observer.failures["timeout"] for one in three)
            redis.thaw()
            await until(lambda: not any(one.observer.is_away for one in three))
            assert await enter_all(three, 9, requests_per_min=50) == []  # the minute is as full as before
            assert len(await enter_often(three, 60, requests_per_min=60)) == 10

    run(test)


def test_what_a_late_redis_counts_for_a_request_that_was_given_up_is_taken_back(redis: RedisServer) -> None:
    async def test() -> None:
        alice, replica = caller(requests_per_min=3), Replica(redis, is_closed_when_away=True, timeout_s=TIMEOUT_S)
        await replica.limits.start()
        assert len(await enter_all([replica], 1, requests_per_min=3)) == 1
        await asyncio.sleep(1.1)  # into a second in which this replica takes nothing
        redis.freeze()
        with pytest.raises(LimitsUnavailable):
            await replica.limits.enter(alice)
        redis.thaw()  # the command was sent: it is carried out now
        await all_back([replica])
        assert len(await enter_often([replica], 5, requests_per_min=3)) == 2
        await replica.limits.close()

    run(test)


@pytest.mark.parametrize("fault", ["restart", "empty"])
def test_a_redis_that_lost_everything_is_told_all_again(redis: RedisServer, fault: str) -> None:
    async def test() -> None:
        async with replicas(redis, 3) as three:
            running = await enter_all(three, 30, requests_per_min=40, concurrency=35)
            await asyncio.sleep(5 * QUICK.beat_s)  # each hears of the others
            if fault == "restart":
                redis.kill()
                redis.start()
            else:
                redis.command("FLUSHALL")
            more = await enter_all(three, 30, requests_per_min=40, concurrency=35)
            assert len(running) + len(more) <= 35
            await all_back(three)
            await asyncio.sleep(3 * QUICK.beat_s)
            more += await enter_often(three, 30, requests_per_min=40, concurrency=35)
            assert len(running) + len(more) == 35
            for one in running:
                one.settle(0)
            await until(lambda: not any(one.limits._flushes for one in three))
            assert len(await enter_often(three, 30, requests_per_min=40, concurrency=35)) == 5

    run(test)


def test_the_places_of_a_replica_that_died_come_back_and_its_tokens_stay_counted(redis: RedisServer) -> None:
    async def test() -> None:
        alice = caller(tokens_per_min=1000, concurrency=4)
        async with replicas(redis, 2) as (dying, other):
            for _ in range(4):
                await (await dying.limits.enter(alice)).grow(100)
            assert await other.enter(alice) is None
            await dying.crash()
            await until(lambda: other.observer.num_replicas == 1)
            await asyncio.sleep(QUICK.slot_lease_s)
            assert await other.enter(alice) is not None
            assert other.left(alice, "tokens") == 600

    run(test)


def test_slots_of_a_long_answer_stay_taken(redis: RedisServer) -> None:
    async def test() -> None:
        alice = caller(concurrency=1)
        async with replicas(redis, 2) as (one, other):
            running = await one.limits.enter(alice)
            await asyncio.sleep(1.5 * QUICK.slot_lease_s)
            assert await other.enter(alice) is None
            running.settle(1)
            await until(lambda: not one.limits._flushes)
            assert await other.enter(alice) is not None

    run(test)


def test_closed_admits_nobody_while_redis_is_away(redis: RedisServer) -> None:
    async def test() -> None:
        replica = Replica(redis, is_closed_when_away=True)
        await replica.limits.start()
        assert await replica.enter(caller(requests_per_min=5)) is not None
        redis.kill()
        with pytest.raises(LimitsUnavailable):
            await replica.limits.enter(caller(requests_per_min=5))
        assert await replica.limits.enter(ANONYMOUS) is not None
        assert replica.observer.refused["limits"] == 1
        await replica.limits.close()

    run(test)


def test_a_replica_that_never_met_redis_admits_nobody_until_it_does(redis: RedisServer) -> None:
    async def test() -> None:
        redis.kill()
        replica = Replica(redis)
        await replica.limits.start()
        with pytest.raises(LimitsUnavailable):
            await replica.limits.enter(caller(requests_per_min=5))
        redis.start()
        await until(lambda: not replica.observer.is_away)
        assert await replica.enter(caller(requests_per_min=5)) is not None
        await replica.limits.close()

    run(test)


def test_nothing_is_lost_and_nothing_counts_twice_whatever_redis_does(redis: RedisServer, size: Size) -> None:
    """Random requests over three replicas and random faults; in the end Redis has what was used, to the token."""
    dice = random.Random(21)
    limit = 10**9
    alice = caller(tokens_per_min=limit, requests_per_min=10**5, concurrency=64)

    async def client(replica: Replica, used: list[int], over: asyncio.Event) -> None:
        while not over.is_set():
            reservation = await replica.enter(alice)
            if reservation is not None:
                await reservation.grow(dice.randint(1, 500))
                await asyncio.sleep(dice.random() * 0.02)
                reservation.settle(num_used := dice.randint(1, 700))
                used.append(num_used)
            await asyncio.sleep(dice.random() * 0.01)

    async def break_now_and_then(seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            fault = dice.choice(["freeze", "restart", "empty", "empty"])
            if fault == "freeze":
                redis.freeze()
                await asyncio.sleep(dice.uniform(0.1, 0.8))
                redis.thaw()
            elif fault == "restart":
                await asyncio.to_thread(redis.kill)
                await asyncio.sleep(dice.uniform(0.0, 0.4))
                await asyncio.to_thread(redis.start)
            else:
                await asyncio.to_thread(redis.command, "FLUSHALL")
            await asyncio.sleep(dice.uniform(0.1, 1.2))

    async def test() -> None:
        used: list[int] = []
        async with replicas(redis, 3, TIMEOUT_S) as three:
            over = asyncio.Event()
            clients = [asyncio.create_task(client(one, used, over)) for one in three for _ in range(4)]
            await break_now_and_then(size(5, 30))
            over.set()
            await asyncio.gather(*clients)
            assert len(used) > 100
            num_asked = 0
            while num_asked == 0 or any(one.observer.is_away for one in three):  # on a busy machine Redis may be late
                await until(lambda: not any(one.observer.is_away for one in three))
                await asyncio.sleep(3 * QUICK.beat_s)  # all have told what they had to tell
                for one in three:
                    assert await one.enter(alice) is not None
                    num_asked += 1
            assert {one.left(alice, "tokens") for one in three} == {limit - sum(used)}
            assert three[-1].left(alice, "requests") == 10**5 - len(used) - num_asked

    run(test)


def test_a_reservation_takes_less_than_a_millisecond_or_so(redis: RedisServer, record: Record) -> None:
    async def test() -> None:
        async with replicas(redis, 1) as (one,):
            for _ in range(500):
                await one.limits.enter(caller(requests_per_min=10**6))
            seconds = sorted(one.observer.seconds)
            record("limits-reservation", {"p50_s": statistics.median(seconds), "p99_s": seconds[495]})
            assert statistics.median(seconds) < 0.01

    run(test)
