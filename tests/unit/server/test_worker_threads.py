"""Worker threads: which caller gets one, and when it is free again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvarn.server.access.priority_semaphore import Claim
from kvarn.server.process.worker_threads import WorkerThreads

FREE, PAID, TOP = 0, 10, 20


class Work:
    """Pieces of work that run until they are let go, and the order in which they began."""

    def __init__(self, workers: WorkerThreads) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self._workers = workers
        self._gates: dict[str, threading.Event] = {}

    def ask(self, name: str, priority: int, owner: str | None = None) -> asyncio.Task[str]:
        self._gates[name] = threading.Event()
        return asyncio.create_task(self._workers.run(Claim(priority, owner), self._do, name))

    def let_go(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()

    def _do(self, name: str) -> str:
        self.began.append(name)
        assert self._gates[name].wait(20)
        self.ended.append(name)
        return f"{name} is done"


def running(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.002)


def test_a_free_thread_goes_to_the_highest_priority_and_then_to_the_first() -> None:
    async def run() -> None:
        work = Work(WorkerThreads(1, 0))
        asked = [("a", FREE), ("b", FREE), ("c", PAID), ("d", TOP), ("e", PAID), ("f", FREE)]
        tasks = []
        for name, priority in asked:
            tasks.append(work.ask(name, priority))
            await asyncio.sleep(0)
        work.let_go(*"abcdef")
        assert await asyncio.gather(*tasks) == [f"{name} is done" for name, _ in asked]
        assert "".join(work.began) == "adcebf"

    running(run)


def test_some_threads_are_reserved_for_higher_priorities() -> None:
    async def run() -> None:
        work = Work(WorkerThreads(4, 1))
        tasks = [work.ask(name, FREE) for name in "abcd"]
        await until(lambda: len(work.began) == 3)
        tasks += [work.ask(name, PAID) for name in "xy"]
        await until(lambda: len(work.began) == 4)
        await asyncio.sleep(0.02)
        assert sorted(work.began) == ["a", "b", "c", "x"]
        work.let_go("a")
        await until(lambda: len(work.began) == 5)
        assert work.began[-1] == "y"
        work.let_go(*"bcdxy")
        await asyncio.gather(*tasks)

    running(run)


def test_a_key_holds_no_more_than_its_share_however_many_threads_are_free() -> None:
    async def run() -> None:
        work = Work(WorkerThreads(3, 0, max_per_key=1))
        tasks = [work.ask(name, FREE, "greedy") for name in ("g1", "g2", "g3")]
        tasks.append(work.ask("h1", FREE, "other"))
        await until(lambda: len(work.began) == 2)
        await asyncio.sleep(0.02)
        assert work.began == ["g1", "h1"]
        work.let_go("g1", "g2", "g3", "h1")
        await asyncio.gather(*tasks)
        assert work.began == ["g1", "h1", "g2", "g3"]

    running(run)


def test_keys_of_one_priority_take_turns_whatever_they_have_queued() -> None:
    async def run() -> None:
        work = Work(WorkerThreads(1, 0, max_per_key=None))
        asked = [(f"{owner}{number}", owner) for owner in "ab" for number in range(3)] + [("c0", "c")]
        tasks = []
        for name, owner in asked:
            tasks.append(work.ask(name, FREE, owner))
            await asyncio.sleep(0)
        work.let_go(*(name for name, _ in asked))
        await asyncio.gather(*tasks)
        assert work.began == ["a0", "b0", "c0", "a1", "b1", "a2", "b2"]

    running(run)


def test_without_keys_nobody_has_a_share() -> None:
    async def run() -> None:
        work = Work(WorkerThreads(3, 0, max_per_key=1))
        tasks = [work.ask(name, FREE) for name in "abc"]
        await until(lambda: len(work.began) == 3)
        work.let_go(*"abc")
        await asyncio.gather(*tasks)

    running(run)


def test_work_cancelled_in_the_queue_never_begins() -> None:
    async def run() -> None:
        work = Work(workers := WorkerThreads(1, 0))
        first, second, third = (work.ask(name, FREE) for name in "abc")
        await until(lambda: work.began == ["a"])
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert len(workers._slots._waiting) == 1
        work.let_go("a", "c")
        await asyncio.gather(first, third)
        assert work.began == ["a", "c"]

    running(run)


def test_cancelling_running_work_frees_no_thread() -> None:
    async def run() -> None:
        work = Work(workers := WorkerThreads(1, 0))
        first, second = work.ask("a", FREE), work.ask("b", FREE)
        await until(lambda: work.began == ["a"])
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await asyncio.sleep(0.05)
        assert work.began == ["a"]
        work.let_go("a", "b")
        await second
        assert work.ended == ["a", "b"]
        await until(lambda: workers._slots._held.total() == 0)

    running(run)


def test_a_slot_granted_to_a_cancelled_caller_goes_to_the_next() -> None:
    async def run() -> None:
        work = Work(workers := WorkerThreads(1, 0))
        first, second, third = (work.ask(name, FREE) for name in "abc")
        await until(lambda: work.began == ["a"])
        workers._slots.release(Claim(FREE))  # as if the thread were free: the second is granted the slot ...
        second.cancel()  # ... before it could take it
        await asyncio.sleep(0.02)
        assert second.cancelled()
        work.let_go("a", "c")
        await asyncio.gather(first, third)
        assert work.began == ["a", "c"]

    running(run)


def test_what_work_raises_reaches_the_caller_and_frees_the_thread() -> None:
    async def run() -> None:
        workers = WorkerThreads(1, 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await workers.run(Claim(FREE), lambda: 1 / 0)

    running(run)
