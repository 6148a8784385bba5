"""Blocks from disk, read and verified on threads of their own, a little ahead of who takes them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from kvarn.prefix_store.pack import UInt8
from kvarn.prefix_store.store import BlockStore

AHEAD_BYTES = 32 << 20  # read and not yet taken
NUM_THREADS = 2  # a MAC takes longer than the read from a cached file


class ReadJob:
    """The blocks of one chain. take() gives them in order as they have come; the job ends with the first miss."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        self.digests = tuple(digests)
        self.is_cancelled = False
        self._found: dict[int, UInt8] = {}  # read and not yet taken, by their number
        self._num_begun = self._num_given = self._num_taken = 0
        self._end = len(self.digests)  # the first that is a miss

    @property
    def is_over(self) -> bool:
        """Nothing comes any more."""
        return not self.is_ready and (self.is_cancelled or self._num_taken >= self._end)

    @property
    def is_ready(self) -> bool:
        """The next block has come."""
        return self._num_taken in self._found and self._num_taken < self._end

    def take(self) -> UInt8 | None:
        """The next block; None: it has not come yet, or none will."""
        content = self._found.pop(self._num_taken, None) if self._num_taken < self._end else None
        self._num_taken += content is not None
        return content

    def begin_next(self, max_ahead: int) -> int | None:
        """The number of the next block to read; None: those read are not taken yet. One thread at a time."""
        if self._num_begun - self._num_taken >= max_ahead:
            return None
        self._num_begun += 1
        return self._num_begun - 1

    @property
    def is_begun(self) -> bool:
        """Nothing is left to begin with."""
        return self.is_cancelled or self._num_begun >= self._end

    def give(self, number: int, content: UInt8 | None) -> bool:
        """What was read; whether it was the last block of all. One thread at a time."""
        if content is None:
            self._end = min(self._end, number)
            return False
        self._found[number] = content
        self._num_given += 1
        return self._num_given == len(self.digests)


class BlockReader:
    """Serves jobs in turn."""

    def __init__(self, store: BlockStore) -> None:
        self.progress_at = time.monotonic()  # when the disk gave the last block, or began to read
        self._store = store
        self._max_ahead = max(2, AHEAD_BYTES // store.block_bytes)
        self._jobs: deque[ReadJob] = deque()
        self._changed = threading.Condition()
        self._num_reading = 0  # blocks
        self._unused: list[UInt8] = []  # contents that were taken: memory touched before, where the next ones may lie
        self._is_closed = False
        self._is_started = False

    def begin(self, digests: Sequence[bytes]) -> ReadJob:
        """Read these blocks."""
        job = ReadJob(digests)
        with self._changed:
            self._jobs.append(job)
            if not self._num_reading:  # else the time since the disk gave nothing would count
                self.progress_at = time.monotonic()
            if not self._is_started:  # a model whose prefixes nobody asks for again needs no threads
                self._is_started = True
                for _ in range(NUM_THREADS):
                    threading.Thread(target=self._run, name="kvarn-prefix-reader", daemon=True).start()
            self._changed.notify_all()
        return job

    def taken(self, contents: Sequence[UInt8]) -> None:
        """Blocks were taken, and nobody reads these contents any more: there is room for others."""
        with self._changed:
            if self._num_reading or not all(job.is_begun for job in self._jobs):
                self._unused.extend(contents)
            else:
                self._unused.clear()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for job in self._jobs:
                job.is_cancelled = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            job, number, unused = task
            content = None
            try:
                content = self._store.read(job.digests[number], unused)
            except Exception as error:  # out of memory: this job ends, the next may not
                self._store.folder.failures.tell("blocks could not be read", error)
            with self._changed:
                is_last = job.give(number, content)
                self._num_reading -= 1
            self.progress_at = time.monotonic()
            if is_last:
                self._store.touch(job.digests)

    def _next(self) -> tuple[ReadJob, int, UInt8 | None] | None:
        """What to read next, and where to; None: nothing any more."""
        with self._changed:
            while not self._is_closed:
                while self._jobs and self._jobs[0].is_begun:
                    self._jobs.popleft()
                number = self._jobs[0].begin_next(self._max_ahead) if self._jobs else None
                if number is not None:
                    self._num_reading += 1
                    self.progress_at = time.monotonic()
                    return self._jobs[0], number, self._unused.pop() if self._unused else None
                self._changed.wait(1.0 if self._jobs else None)
        return None
