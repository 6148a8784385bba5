"""The batches of one server: made, listed, cancelled by their key, kept in a folder, gone on with after a restart.

    validating ─> in_progress ─> finalizing ─> completed | failed | expired        cancelling ─> cancelled

Knows states and times; how a batch is run is known to execution.py. For one thread: the event loop's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvarn.errors import ConfigError, InvalidParameter, RateLimited
from kvarn.server.batches.file_store import FileStore, write_atomically
from kvarn.server.failures import BatchesUnavailable, BatchesUnwritable, UnknownBatch
from kvarn.server.process.settings import ServerConfig

log = logging.getLogger("kvarn.server")
WINDOW_S = 24 * 3600
MAX_AT_ONCE = 4  # batches that run, each of another key
MAX_OPEN = 32  # batches of one key that have not ended
MAX_KEPT = 1000  # of one key; the oldest that have ended are forgotten
ENDED = ("completed", "failed", "expired", "cancelled")
TIMES = ("in_progress", "finalizing", "cancelling", *ENDED)


@dataclass(slots=True)
class BatchJob:
    """One batch as it is kept."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    status: str = "validating"
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    error: dict[str, Any] | None = None  # why it failed as a whole
    num_lines: int = 0
    num_failed: int = 0
    num_answered: int = 0  # failed ones included
    times: dict[str, int] = field(default_factory=dict)  # when it came into a state

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_S

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def told(self) -> dict[str, Any]:
        """As a client sees it."""
        counts = {
            "total": self.num_lines,
            "completed": self.num_answered - self.num_failed,
            "failed": self.num_failed,
        }
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None if self.error is None else {"object": "list", "data": [self.error]},
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{state}_at": self.times.get(state) for state in TIMES},
            "request_counts": counts,
            "metadata": self.metadata,
        }


Execute = Callable[["BatchJob"], Awaitable[None]]


class BatchJobs:
    """All batches, each with a task until it has ended; files is None where the server has no folder for them."""

    def __init__(self, config: ServerConfig) -> None:
        self._files: FileStore | None = None
        self._jobs: dict[str, BatchJob] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._execute: Execute | None = None
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each key: one batch after the other
        self._running = asyncio.Semaphore(MAX_AT_ONCE)
        if config.batch_dir is not None:
            self._files = FileStore(config.batch_dir / "files", config.batch_bytes)
            self._folder = config.batch_dir / "batches"
            self._read()

    @property
    def files(self) -> FileStore:
        """Where files are kept, or BatchesUnavailable."""
        if self._files is None:
            raise BatchesUnavailable("this server keeps no files and batches; start it with --batch-dir DIR")
        return self._files

    def start(self, execute: Execute) -> None:
        """The models can be asked: go on with what has not ended."""
        self._execute = execute
        for job in self._jobs.values():
            if not job.has_ended:
                self._begin(job)

    def create(self, owner: str, endpoint: str, input_file_id: str, metadata: dict[str, str] | None) -> BatchJob:
        """Keep a batch and run it when it is its turn."""
        file = self.files.get(owner, input_file_id)
        if file.purpose != "batch":
            raise InvalidParameter(
                f"the file's purpose is {file.purpose!r}; upload it for batch", field="input_file_id"
            )
        if (num_open := sum(not one.has_ended for one in self.of(owner))) >= MAX_OPEN:
            words = f"{num_open} batches of this key have not ended, at most {MAX_OPEN} may be open; wait or cancel one"
            raise RateLimited(words, retry_after_s=60.0, reason="batches", headers={})
        self._forget_oldest(owner)
        job = BatchJob(f"batch_{secrets.token_hex(12)}", owner, endpoint, file.id, int(time.time()), metadata=metadata)
        self.save(job)
        self._jobs[job.id] = job
        self._begin(job)
        return job

    def get(self, owner: str, batch_id: str) -> BatchJob:
        """The owner's batch with this id."""
        assert self.files is not None  # or refused
        found = self._jobs.get(batch_id)
        if found is None or found.owner != owner:
            raise UnknownBatch("no batch with this id is kept for this key; list them with GET /v1/batches")
        return found

    def of(self, owner: str) -> list[BatchJob]:
        """All batches of an owner, oldest first."""
        return [one for one in self._jobs.values() if one.owner == owner]

    def cancel(self, job: BatchJob) -> None:
        """End a batch; what was answered is kept for its owner."""
        if job.has_ended or job.status == "cancelling":
            raise InvalidParameter(
                f"the batch is {job.status}; only one that has not ended can be cancelled", field=None
            )
        self.move(job, "cancelling")
        if (task := self._tasks.get(job.id)) is not None:
            task.cancel()
        self._begin(job)

    def move(self, job: BatchJob, status: str) -> None:
        """Note a new state, on disk first: one that cannot be kept there is none."""
        times = {**job.times, status: int(time.time())}
        self.save(replace(job, status=status, times=times))
        job.status, job.times = status, times

    def save(self, job: BatchJob) -> None:
        write_atomically(self._folder / f"{job.id}.json", json.dumps(asdict(job)).encode())

    def log_path(self, job: BatchJob) -> Path:
        """Where its answers are kept until it has ended."""
        return self._folder / f"{job.id}.answers"

    async def close(self) -> None:
        """Stop; the next process goes on."""
        tasks, self._execute = list(self._tasks.values()), None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, job: BatchJob) -> None:
        if self._execute is None:
            return
        before = self._tasks.get(job.id)
        task = self._tasks[job.id] = asyncio.create_task(self._run(job, self._execute, before))
        task.add_done_callback(lambda done: self._tasks.pop(job.id) if self._tasks.get(job.id) is done else None)

    async def _run(self, job: BatchJob, execute: Execute, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            async with self._turns[job.owner], self._running:
                await execute(job)
        except Exception as error:
            log.error("batch %s failed: %s", job.id, type(error).__name__, exc_info=error)
            job.error = {"code": "server_error", "message": "the server failed on this batch; it was logged"}
            try:
                self.move(job, "failed")
            except BatchesUnwritable as unkept:  # the next start goes on with it
                job.status, job.error = "failed", {"code": "storage", "message": str(unkept)}

    def _forget_oldest(self, owner: str) -> None:
        ended = [one for one in self.of(owner) if one.has_ended]
        for one in ended[: max(0, len(ended) - MAX_KEPT + 1)]:
            (self._folder / f"{one.id}.json").unlink(missing_ok=True)
            del self._jobs[one.id]

    def _read(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = [BatchJob(**json.loads(path.read_bytes())) for path in self._folder.glob("*.json")]
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"batch_dir {self._folder} cannot be read: {error}; give another folder") from None
        self._jobs = {one.id: one for one in sorted(found, key=lambda one: (one.created_at, one.id))}
