"""Several processes that answer one batch: each has an engine, whoever has least to do is asked next.

One that is killed or stands still is started again, and what it had not answered is asked of another. Knows no file.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from kvarn.backends.select import device_memory, worker_devices
from kvarn.errors import BackendError, ConfigError
from kvarn.machine import choose_threads, cpu_limits
from kvarn.server.access.keys import Principal
from kvarn.server.batches.in_process import BatchAnswer
from kvarn.server.batches.workers.messages import (
    Answered,
    Ask,
    Begin,
    Message,
    Started,
    read_message,
    write_message,
)
from kvarn.server.process.settings import ServerConfig

log = logging.getLogger("kvarn.server")

HOST = "kvarn.server.batches.workers.worker"
MAX_TRIES = 3  # of one request whose worker was lost; then it is the request
END_S = 5.0
SILENT_S = 30.0  # without a beat a worker stands still: stopped, or lost to the machine's memory


class WorkerLost(Exception):
    """The process has ended."""


class WorkerProcess:
    """One worker, from the side of who asks."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.num_answered = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[BatchAnswer]] = {}

    @property
    def num_open(self) -> int:
        return len(self._asked)

    async def start(self) -> None:
        """Return when it has loaded; raise why it has not."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", HOST, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal ends it by its socket
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        write_message(self._writer, Begin(self.config))
        started = await read_message(reader)
        if not isinstance(started, Started):
            raise BackendError(f"a worker ended with code {self._process.wait(END_S)} while it was loading")
        if started.error is not None:
            raise started.error.error()
        self._reading = asyncio.create_task(self._read(reader))

    async def ask(self, url: str, body: bytes) -> BatchAnswer:
        """Its response; WorkerLost: it has ended meanwhile."""
        assert self._writer is not None
        assert self._reading is not None, "it has started"
        if self._reading.done():
            raise WorkerLost
        number = next(self._numbers)
        answered: asyncio.Future[BatchAnswer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answered
        try:
            write_message(self._writer, Ask(number, url, body))
            with suppress(ConnectionError):
                await self._writer.drain()
            return await answered
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        """End it: it does so when its socket ends."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await self._heard(reader)) is not None:
            if not isinstance(message, Answered):
                continue
            self.num_answered += 1
            if (asked := self._asked.get(message.number)) is not None and not asked.done():
                asked.set_result(message.answer)
        for one in self._asked.values():
            if not one.done():
                one.set_exception(WorkerLost())

    async def _heard(self, reader: asyncio.StreamReader) -> Message | None:
        """What it says next; None: it has ended, or was ended because it says nothing any more."""
        try:
            async with asyncio.timeout(SILENT_S):
                return await read_message(reader)
        except TimeoutError:
            log.error("a worker has said nothing for %g s, is ended and started again", SILENT_S)
            assert self._process is not None, "it has started"
            self._process.kill()
            return None


class WorkerPool:
    """As many processes as there are configurations. For one event loop."""

    def __init__(self, configs: Sequence[ServerConfig]) -> None:
        self._workers = [WorkerProcess(config) for config in configs]
        self._starting: dict[int, asyncio.Task[None]] = {}  # places of workers that were lost

    async def start(self) -> None:
        """The first alone: what cannot be served is found once, and fetched once."""
        await self._workers[0].start()
        await asyncio.gather(*(one.start() for one in self._workers[1:]))

    async def ask(self, _principal: Principal, url: str, body: bytes) -> BatchAnswer:
        """As InProcess does."""
        for _ in range(MAX_TRIES):
            place = min(range(len(self._workers)), key=self._load)
            if place in self._starting:
                await asyncio.shield(self._starting[place])
            worker = self._workers[place]
            try:
                return await worker.ask(url, body)
            except WorkerLost:
                self._replace(place, worker)
        raise BackendError(f"{MAX_TRIES} workers ended while they answered the same request; is there enough memory?")

    async def close(self) -> None:
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*(one.close() for one in self._workers))

    def _load(self, place: int) -> tuple[bool, int]:
        return place in self._starting, self._workers[place].num_open

    def _replace(self, place: int, lost: WorkerProcess) -> None:
        """Start another in the place of one that was lost, once."""
        if self._workers[place] is not lost or place in self._starting:
            return
        if not lost.num_answered:
            raise BackendError(
                "a worker ended before it had answered anything; is there enough memory for all of them?"
            )
        task = self._starting[place] = asyncio.create_task(self._start_again(place, lost))
        task.add_done_callback(_tell_failure)

    async def _start_again(self, place: int, lost: WorkerProcess) -> None:
        worker = WorkerProcess(lost.config)
        try:
            await lost.close()
            await worker.start()
            self._workers[place] = worker
        finally:
            del self._starting[place]


def _tell_failure(starting: asyncio.Task[None]) -> None:
    """Of a start for which nobody need have waited; the next request tries again."""
    if not starting.cancelled() and (error := starting.exception()) is not None:
        log.error("a worker could not be started again, the others go on: %s", error)


def worker_configs(config: ServerConfig, number: int) -> list[ServerConfig]:
    """The settings of so many workers: each with its share of cores and memory, or a GPU of its own."""
    engine = config.engine
    devices = worker_devices(engine, number)
    allowed = cpu_limits().allowed
    if devices is None and number > allowed:
        raise ConfigError(f"workers is {number} and {allowed} CPUs can be used; give at most that many")
    threads = engine.threads or max(1, choose_threads().count // number)
    if devices is not None:
        return [replace(config, engine=replace(engine, threads=threads, device=one)) for one in devices]
    memory = config.memory_bytes or device_memory(engine).num_bytes
    shared = replace(config, engine=replace(engine, threads=threads), memory_bytes=memory // number)
    return [shared] * number
