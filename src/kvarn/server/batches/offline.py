"""`kvarn batch`: the parts of a server without its sockets, for one file of requests and one of answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvarn.errors import ConfigError
from kvarn.server.access.keys import ANONYMOUS
from kvarn.server.batches.answer_log import AnswerLog
from kvarn.server.batches.batch_run import BatchRun, BatchServer
from kvarn.server.batches.in_process import ENDPOINTS, InProcess
from kvarn.server.batches.lines import BatchLine, BrokenLine, LineRules, read_lines
from kvarn.server.batches.workers.pool import WorkerPool, worker_configs
from kvarn.server.process.serve import make_state
from kvarn.server.process.settings import ServerConfig

LONGEST_S = 1e6  # an answer takes as long as it takes
OnProgress = Callable[[int, int], object]  # lines answered, of how many


@dataclass(frozen=True, slots=True)
class Processes:
    """How many engines a batch has, and how many requests are on their way to each."""

    workers: int = 1  # 1: this process
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a batch came to."""

    num_lines: int
    num_failed: int
    num_before: int  # answered by an earlier run


def run_offline(
    config: ServerConfig, source: Path, target: Path, processes: Processes, on_progress: OnProgress
) -> BatchSummary:
    """Answer every line of source that target does not have yet."""
    rules = LineRules(tuple(ENDPOINTS), config.max_body_bytes, config.max_json_depth)
    _check_target(source, target)
    with source.open("rb") as file, AnswerLog(target) as log:
        are_answered = [log.has(line) for line in read_lines(file, rules)]
        num_lines, num_before, num_in_log = len(are_answered), sum(are_answered), len(log)
        on_progress(num_before, num_lines)
        if num_before < num_lines:
            file.seek(0)
            report = partial(_report, log, num_in_log - num_before, num_lines, on_progress)
            try:
                asyncio.run(_run(config, processes, read_lines(file, rules), log, report))
            except ExceptionGroup as group:  # of requests side by side: the first is why
                raise group.exceptions[0] from None
        return BatchSummary(num_lines, log.num_failed, num_before)


def _report(log: AnswerLog, num_others: int, num_lines: int, on_progress: OnProgress) -> None:
    on_progress(len(log) - num_others, num_lines)


async def _run(
    config: ServerConfig,
    processes: Processes,
    lines: Iterator[BatchLine | BrokenLine],
    log: AnswerLog,
    on_answer: Callable[[], None],
) -> None:
    # Twice as many as run: the next ones are prepared while a batch computes.
    each = processes.concurrency or 2 * config.engine.max_running
    async with _server(_offline(config, each), processes.workers) as server:
        await BatchRun(server, ANONYMOUS, log, on_answer).run(lines, processes.workers * each)


@asynccontextmanager
async def _server(config: ServerConfig, num_workers: int) -> AsyncIterator[BatchServer]:
    """Who answers: this process, or so many others."""
    if num_workers > 1:
        pool = WorkerPool(worker_configs(config, num_workers))
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()
        return
    state = make_state(config)
    try:
        await state.models.start()
        state.lifecycle.become_ready()
        yield InProcess(state)
    finally:
        for part in (state.models, state.responses):
            await part.close()


def _offline(config: ServerConfig, concurrency: int) -> ServerConfig:
    """Without keys and sockets, and with room for every request that is on its way."""
    limit = max(config.queue_limit, concurrency * config.max_n)
    engine = replace(config.engine, queue_limit=limit)
    return replace(
        config,
        keys=None,
        host="127.0.0.1",
        batch_dir=None,
        queue_limit=limit,
        request_timeout_s=LONGEST_S,
        engine=engine,
    )


def _check_target(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        raise ConfigError(f"the answers would go to {target}, which has the requests; give another -o")
