"""Runs the lines of a batch: so many at once that the engine's batch is full until the last, each answered once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvarn.server.access.keys import Principal
from kvarn.server.batches.answer_log import AnswerLog
from kvarn.server.batches.in_process import BatchAnswer
from kvarn.server.batches.lines import BatchLine, BrokenLine

OnAnswer = Callable[[], None]
MIN_WAIT_S, MAX_WAIT_S = 0.1, 60.0  # before one that was refused for now is asked again


class BatchServer(Protocol):
    """Who answers: this process (InProcess), or several (WorkerPool)."""

    async def ask(self, principal: Principal, url: str, body: bytes) -> BatchAnswer:
        """The response to a body; failures are responses too."""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch on its way; can be cancelled at any await, and run again with the same log."""

    server: BatchServer
    principal: Principal
    log: AnswerLog
    on_answer: OnAnswer

    async def run(self, lines: Iterator[BatchLine | BrokenLine], concurrency: int) -> None:
        """BatchAnswer every line that the log does not have yet."""
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(lines))

    async def _work(self, lines: Iterator[BatchLine | BrokenLine]) -> None:
        """Take one line after the other; all workers take from the same lines."""
        for num_taken, line in enumerate(lines):
            if self.log.has(line):
                if num_taken % 256 == 255:
                    await asyncio.sleep(0)  # others have the loop meanwhile
                continue
            if isinstance(line, BrokenLine):
                self.log.add_broken(line)
            else:
                answer = await self._answered(line)
                self.log.add_answer(line, answer.status, answer.request_id, answer.body)
            self.on_answer()

    async def _answered(self, line: BatchLine) -> BatchAnswer:
        while True:
            answer = await self.server.ask(self.principal, line.url, line.body)
            if answer.retry_after_s is None:
                return answer
            await asyncio.sleep(min(max(answer.retry_after_s, MIN_WAIT_S), MAX_WAIT_S))
