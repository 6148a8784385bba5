"""Several replicas that count limits in one Redis, in one event loop, and what may go wrong with it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

from kvarn.errors import RateLimited
from kvarn.server.access.keys import Principal
from kvarn.server.access.reservation import Reservation
from kvarn.server.access.shared.limits import SharedLimits
from kvarn.server.access.shared.membership import BeatTimes
from kvarn.server.access.shared.store import RedisStore
from kvarn.server.access.tiers import Tier
from tests.redis_server import RedisServer

QUICK = BeatTimes(beat_s=0.2, join_s=0.6, replica_lease_s=2, slot_lease_s=2, renew_s=0.5)

PATIENT_S = 2.0  # for an answer of Redis: on a busy machine a healthy one may take longer than by default


class Observer:
    """Keeps what the metrics would be told."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.is_away = False
        self.num_replicas = 0
        self.seconds: list[float] = []

    def request_refused(self, tier: str, reason: str) -> None:
        self.refused[reason] += 1

    def limits_failed(self, reason: str) -> None:
        self.failures[reason] += 1

    def update_limits(self, is_away: bool, num_replicas: int) -> None:
        self.is_away, self.num_replicas = is_away, num_replicas

    def limits_asked(self, seconds: float) -> None:
        self.seconds.append(seconds)


class CutLine:
    """`async with CutLine(redis) as line`: a replica's way to Redis. Cut, it lets nothing pass and tells nobody."""

    def __init__(self, redis: RedisServer) -> None:
        self._redis_port = redis.port
        self._is_whole = asyncio.Event()
        self._passing: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def cut(self) -> None:
        self._is_whole.clear()

    def mend(self) -> None:
        self._is_whole.set()

    async def __aenter__(self) -> CutLine:
        self.mend()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._passing:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._redis_port)
        ways = [asyncio.ensure_future(one) for one in (self._pass(reader, back), self._pass(there, writer))]
        self._passing.update(ways)
        await asyncio.wait(ways)
        self._passing.difference_update(ways)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._is_whole.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class Replica:
    """One server's limits."""

    def __init__(
        self,
        redis: RedisServer | CutLine,
        times: BeatTimes = QUICK,
        is_closed_when_away: bool = False,
        timeout_s: float = PATIENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.observer = Observer()
        self.limits = SharedLimits(RedisStore(redis.url, timeout_s), self.observer, is_closed_when_away, times, clock)

    async def enter(self, caller: Principal) -> Reservation | None:
        """A reservation, or None: refused."""
        try:
            return await self.limits.enter(caller)
        except RateLimited:
            return None

    def left(self, caller: Principal, what: str) -> int:
        return int(self.limits.headers(caller)[f"x-ratelimit-remaining-{what}"])

    async def crash(self) -> None:
        """As kill -9: nobody is told anything."""
        assert self.limits._beating is not None
        self.limits._beating.cancel()
        await self.limits._store.close()


@asynccontextmanager
async def replicas(redis: RedisServer, number: int, timeout_s: float = PATIENT_S) -> AsyncIterator[list[Replica]]:
    """So many, each of which knows all others."""
    started = [Replica(redis, timeout_s=timeout_s) for _ in range(number)]
    for one in started:
        await one.limits.start()
    await until(lambda: all(one.observer.num_replicas == number for one in started))
    try:
        yield started
    finally:
        for one in started:
            await one.limits.close()


def race(port: int, number: int, begin: Barrier, counts: Queue[int]) -> None:
    """In a process of its own: so many requests at once when all are there; tells how many entered."""

    async def run() -> None:
        redis = RedisServer.__new__(RedisServer)
        redis.port = port
        replica, alice = Replica(redis, BeatTimes()), Principal("alice", Tier("racers", requests_per_min=50), "")
        await replica.limits.start()
        await asyncio.to_thread(begin.wait)
        entered = await asyncio.gather(*(replica.enter(alice) for _ in range(number)))
        counts.put(sum(one is not None for one in entered))
        await replica.limits.close()

    asyncio.run(run())


async def until(is_so: object, timeout_s: float = 15.0) -> None:
    """Wait until a condition holds."""
    assert callable(is_so)
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.02)
