"""Limits over replicas that are cut off from Redis, or whose clocks differ: how much more than the limit enters."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvarn.errors import LimitsUnavailable
from tests.conftest import Record
from tests.redis_server import RedisServer, require_redis
from tests.server.sharing import PATIENT_S, QUICK, CutLine, Replica, replicas, until
from tests.unit.server.limiting import caller

LIMIT, BEFORE, NUM_REPLICAS = 60, 12, 3


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    require_redis()
    with RedisServer() as server:
        yield server


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def entered(among: list[Replica], number: int, **limits: int) -> int:
    """How many of so many requests at once enter."""
    alice = caller(**limits)
    asked = [among[index % len(among)] for index in range(number)]
    found = await asyncio.gather(*(one.enter(alice) for one in asked), return_exceptions=True)
    assert all(one is None or not isinstance(one, BaseException) or isinstance(one, LimitsUnavailable) for one in found)
    return sum(one is not None and not isinstance(one, BaseException) for one in found)


@pytest.mark.parametrize("limit", ["requests_per_min", "concurrency"])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_replica_that_is_cut_off_admits_its_part_beyond_the_limit_and_no_more(
    redis: RedisServer, record: Record, limit: str, is_closed: bool
) -> None:
    """Of what was free a third is its own; without a word between the sides nobody can take it from the others."""

    async def test() -> None:
        async with AsyncExitStack() as stack:
            together = await stack.enter_async_context(replicas(redis, NUM_REPLICAS - 1, PATIENT_S))
            line = await stack.enter_async_context(CutLine(redis))
            apart = Replica(line, is_closed_when_away=is_closed, timeout_s=PATIENT_S)
            await apart.limits.start()
            stack.push_async_callback(apart.limits.close)
            await until(lambda: all(one.observer.num_replicas == NUM_REPLICAS for one in (*together, apart)))
            before = await entered(together[:1], BEFORE, **{limit: LIMIT})
            await asyncio.sleep(5 * QUICK.beat_s)  # which the others hear of
            line.cut()
            alone = await entered([apart], 2 * LIMIT, **{limit: LIMIT})
            in_redis = before + await entered(together, 2 * LIMIT, **{limit: LIMIT})
            part = 0 if is_closed else (LIMIT - BEFORE) // NUM_REPLICAS
            if limit == "requests_per_min" and not is_closed:
                record("limits-split-network", {"limit": LIMIT, "in_redis": in_redis, "cut_off": alone, "part": part})
            assert (in_redis, alone) == (LIMIT, part)
            line.mend()
            await until(lambda: not apart.observer.is_away)
            assert await entered([*together, apart], LIMIT, **{limit: LIMIT}) == 0  # what it took is counted
            assert await entered([*together, apart], LIMIT, **{limit: LIMIT + part + 6}) == 6

    run(test)


def test_all_that_are_cut_off_admit_the_limit_once_more_at_most(redis: RedisServer) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            (whole,) = await stack.enter_async_context(replicas(redis, 1, PATIENT_S))
            lines = [await stack.enter_async_context(CutLine(redis)) for _ in range(3)]
            apart = [Replica(line, timeout_s=PATIENT_S) for line in lines]
            for one in apart:
                await one.limits.start()
                stack.push_async_callback(one.limits.close)
            await until(lambda: all(one.observer.num_replicas == 4 for one in (whole, *apart)))
            await asyncio.sleep(3 * QUICK.beat_s)
            for line in lines:
                line.cut()
            alone = await entered(apart, 4 * LIMIT, requests_per_min=LIMIT)
            assert alone == 3 * LIMIT // 4
            assert await entered([whole], 2 * LIMIT, requests_per_min=LIMIT) == LIMIT
            for line in lines:
                line.mend()

    run(test)


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.8)])
def test_clocks_that_are_apart_change_nothing(redis: RedisServer, speeds: tuple[float, ...]) -> None:
    """Hours and years apart, and running at other speeds: Redis's clock counts, and offsets are learned anew."""
    dice = random.Random(5)

    def clock(start_s: float, speed: float) -> Callable[[], float]:
        began = time.monotonic()
        return lambda: start_s + speed * (time.monotonic() - began)

    async def test() -> None:
        starts = (3.0, 86_400.5, 1e9)
        apart = [Replica(redis, clock=clock(*pair)) for pair in zip(starts, speeds, strict=True)]
        for one in apart:
            await one.limits.start()
        await until(lambda: all(one.observer.num_replicas == 3 for one in apart))
        total = 0
        for _ in range(20):  # offsets come to differ by more than the script takes
            total += await entered(apart, dice.randint(1, 12), requests_per_min=LIMIT)
            await asyncio.sleep(1.0 if speeds[1] != 1.0 else 0.02)
        total += await entered(apart, 2 * LIMIT, requests_per_min=LIMIT)
        assert total == LIMIT
        assert not any(one.observer.failures for one in apart)
        for one in apart:
            await one.limits.close()

    run(test)
