"""Blocks from disk, read and verified on threads of their own, a little ahead of who takes them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from kvarn.prefix_store.pack import UInt8
from kvarn.prefix_store.store import BlockStore

AHEAD_BYTES = 32 << 20  # read and not yet taken
NUM_VERIFIERS = 2  # threads; a MAC takes longer than the read from a cached file


class ReadJob:
    """The blocks of one chain, in order. take() gives those that have come; the job ends with the first miss."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        self.digests = tuple(digests)
        self.is_cancelled = False
        self._ready: deque[UInt8] = deque()
        self._is_done = False

    @property
    def is_over(self) -> bool:
        """Nothing comes any more."""
        return (self._is_done or self.is_cancelled) and not self._ready

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def take(self) -> UInt8 | None:
        """The next block; None: it has not come yet, or none will."""
        if not self._ready:
            return None
        return self._ready.popleft()

    def give(self, content: UInt8) -> None:
        self._ready.append(content)

    def end(self) -> None:
        self._is_done = True


class BlockReader:
    """Serves jobs in turn."""

    def __init__(self, store: BlockStore) -> None:
        self.progress_at = time.monotonic()  # when the disk gave the last block, or began to read
        self._store = store
        self._jobs: deque[ReadJob] = deque()
        self._tasks: SimpleQueue[tuple[bytes, Future[UInt8 | None]] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def begin(self, digests: Sequence[bytes]) -> ReadJob:
        """Read these blocks."""
        job = ReadJob(digests)
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:  # a model whose prefixes nobody asks for again needs none
                self._thread = _started(self._run)
                for _ in range(NUM_VERIFIERS):
                    _started(self._verify)
            self._changed.notify()
        return job

    def taken(self) -> None:
        """Blocks were taken: there is room for more."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for job in self._jobs:
                job.is_cancelled = True
            self._changed.notify()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._read(job)
            except Exception as error:  # out of memory: this job ends, the next may not
                self._store.folder.failures.tell("blocks could not be read", error)
            finally:
                job.end()

    def _next(self) -> ReadJob | None:
        with self._changed:
            while not self._jobs and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                for job in self._jobs:
                    job.end()
                for _ in range(NUM_VERIFIERS):
                    self._tasks.put(None)
                return None
            return self._jobs.popleft()

    def _read(self, job: ReadJob) -> None:
        max_ready = max(2, AHEAD_BYTES // self._store.block_bytes)
        left, coming = deque(job.digests), deque[Future[UInt8 | None]]()
        while left or coming:
            with self._changed:
                while job.num_ready >= max_ready and not (job.is_cancelled or self._is_closed):
                    self._changed.wait(1.0)
            if job.is_cancelled or self._is_closed:
                return
            self.progress_at = time.monotonic()
            while left and len(coming) <= NUM_VERIFIERS:
                coming.append(Future())
                self._tasks.put((left.popleft(), coming[-1]))
            content = coming.popleft().result()
            if content is None:
                return
            job.give(content)
            self.progress_at = time.monotonic()
        self._store.touch(job.digests)

    def _verify(self) -> None:
        while (task := self._tasks.get()) is not None:
            digest, read = task
            try:
                read.set_result(self._store.read(digest))
            except BaseException as error:
                read.set_exception(error)


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="kvarn-prefix-reader", daemon=True)
    thread.start()
    return thread
