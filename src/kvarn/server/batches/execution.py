"""Runs one batch of a server from its file to the files of its answers, behind all interactive requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace

from kvarn.errors import StorageQuotaExceeded
from kvarn.server.access.keys import Principal
from kvarn.server.batches.answer_log import OK, AnswerLog
from kvarn.server.batches.batch_run import BatchRun
from kvarn.server.batches.file_store import unwritable
from kvarn.server.batches.in_process import InProcess
from kvarn.server.batches.jobs import MAX_AT_ONCE, WINDOW_S, BatchJob
from kvarn.server.batches.lines import BatchLine, BrokenLine, LineRules, read_lines
from kvarn.server.failures import BatchesUnwritable, UnknownFile
from kvarn.server.state import ServerState
from kvarn.types import MAX_PRIORITY

QUEUE_SHARE = 4  # batches take at most 1 / QUEUE_SHARE of the places in an engine's queue


class _Stopped(Exception):
    """The batch cannot go on: code and message of its error."""


class BatchExecution:
    """Called with a job; returns when it has ended. Cancelled, it leaves the job to be gone on with."""

    def __init__(self, state: ServerState) -> None:
        patient = replace(state, config=replace(state.config, request_timeout_s=float(WINDOW_S)))
        self._server = InProcess(patient)
        self._state = state
        config = state.config
        at_once = min(config.engine.max_running, config.queue_limit // QUEUE_SHARE)
        self._concurrency = max(1, at_once // MAX_AT_ONCE)

    async def __call__(self, job: BatchJob) -> None:
        jobs = self._state.batches
        end = "cancelled"
        try:
            if job.status != "cancelling":
                end = await self._answered(job)
            await asyncio.to_thread(self._write_files, job)
        except (_Stopped, UnknownFile, StorageQuotaExceeded, BatchesUnwritable) as error:
            code = error.args[1] if isinstance(error, _Stopped) else "storage"
            job.error = {"code": code, "message": str(error.args[0]), "param": None, "line": None}
            end = "failed"
            jobs.log_path(job).unlink(missing_ok=True)  # on a full disk, room for what follows
        jobs.move(job, end)
        jobs.log_path(job).unlink(missing_ok=True)

    async def _answered(self, job: BatchJob) -> str:
        """Run what has no answer yet; how the batch ends."""
        jobs, files = self._state.batches, self._state.batches.files
        path = files.path(files.get(job.owner, job.input_file_id))
        config = self._state.config
        rules = LineRules((job.endpoint,), config.max_body_bytes, config.max_json_depth)
        principal = self._principal(job)
        with path.open("rb") as file, AnswerLog(jobs.log_path(job)) as log:
            job.num_lines = await asyncio.to_thread(lambda: sum(1 for line in file if line.strip()))
            jobs.move(job, "in_progress")
            file.seek(0)
            run = BatchRun(self._server, principal, log, lambda: self._note(job, log))
            try:
                async with asyncio.timeout(max(0.0, job.expires_at - time.time())):
                    await run.run(read_lines(file, rules), self._concurrency)
            except TimeoutError:
                file.seek(0)
                _expire(log, read_lines(file, rules))
                return "expired"
            except ExceptionGroup as group:  # of the workers: the first is why
                first = group.exceptions[0]
                raise (unwritable(log.path, first) if isinstance(first, OSError) else first) from None
            finally:
                job.num_answered, job.num_failed = len(log), log.num_failed
        jobs.move(job, "finalizing")
        return "completed"

    def _note(self, job: BatchJob, log: AnswerLog) -> None:
        job.num_answered, job.num_failed = len(log), log.num_failed
        self._state.batches.files.require_room(job.owner, log.path.stat().st_size)

    def _principal(self, job: BatchJob) -> Principal:
        """The key's owner, behind everybody who waits; with limits as large as the key's, counted apart."""
        principal = self._state.keys.of_fingerprint(job.owner)
        if principal is None:
            raise _Stopped("the key of this batch is no longer valid", "invalid_api_key")
        tier = replace(principal.tier, priority=-MAX_PRIORITY, max_priority=-MAX_PRIORITY)
        return replace(principal, key_id=f"{principal.key_id} (batch)", tier=tier)

    def _write_files(self, job: BatchJob) -> None:
        """The answers as files of the key: those with status 200, and all others."""
        path, files = self._state.batches.log_path(job), self._state.batches.files
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        for line in lines:
            parts[_is_good(line)].append(line)
        ids = {}
        for is_good, name in ((True, "output"), (False, "error")):
            if parts[is_good]:
                ids[name], data = f"file-{job.id}-{name}", b"".join(parts[is_good])
                files.put(job.owner, f"{job.id}_{name}.jsonl", "batch_output", data, ids[name])
        job.output_file_id, job.error_file_id = ids.get("output"), ids.get("error")


def _is_good(line: bytes) -> bool:
    response = json.loads(line)["response"]
    return response is not None and response["status_code"] == OK


def _expire(log: AnswerLog, lines: Iterator[BatchLine | BrokenLine]) -> None:
    for line in lines:
        if not log.has(line):
            words = f"line {line.number}: the batch was not done within its window"
            log.add_broken(line if isinstance(line, BrokenLine) else _expired(line, words))


def _expired(line: BatchLine, words: str) -> BrokenLine:
    return BrokenLine(line.number, line.custom_id, "batch_expired", words)
