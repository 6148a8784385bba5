"""Blocks to disk, on a thread of its own that gives way: what it cannot keep up with is dropped.

While requests run it takes at most a small share of one core. The engine's thread copies a block when the writer is
ready for it, so that what waits costs no memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvarn.prefix_store.failures import FailureLog
from kvarn.prefix_store.pack import UInt8
from kvarn.prefix_store.store import BlockStore, BlockToStore

BATCH_BYTES = 4 << 20  # copied at once, between two steps
MAX_WAITING = 8192  # blocks; 128 Ki tokens
BUSY_SHARE = 1 / 128  # of one core while requests run; copies on the engine's thread come on top
POLL_S = 0.05
CLOSE_S = 2.0  # for what still waits when the model is closed

Export = Callable[[Sequence[bytes]], list[tuple[bytes, UInt8]]]  # those of the digests whose blocks are in memory


class BlockWriter:
    """Takes digests, fetches their blocks and has them stored."""

    def __init__(self, store: BlockStore, failures: FailureLog) -> None:
        self.num_dropped = 0
        self.cpu_s = 0.0  # of its thread
        self._store = store
        self._failures = failures
        self._waiting: dict[bytes, str] = {}  # tenant by digest, in order
        self._in_hand: dict[bytes, str] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._export: Export | None = None
        self._is_busy: Callable[[], bool] = lambda: False
        self._thread: threading.Thread | None = None

    @property
    def num_waiting(self) -> int:
        """Blocks that are to be written, or are being written."""
        return len(self._waiting) + len(self._in_hand)

    def start(self, export: Export, is_busy: Callable[[], bool]) -> None:
        """Begin to write. export is called on the writer's thread and comes back with copies."""
        self._export, self._is_busy = export, is_busy
        self._thread = threading.Thread(target=self._run, name="kvarn-prefix-writer", daemon=True)
        self._thread.start()

    def offer(self, digests: Sequence[bytes], tenant: str) -> None:
        """Write the blocks of a chain, in order, that are not there; never waits, and drops what is too much."""
        if self._is_closed or not self._store.may_write():
            return
        with self._changed:
            for digest in digests:
                if digest in self._waiting or digest in self._in_hand or digest in self._store:
                    continue
                if len(self._waiting) >= MAX_WAITING:
                    self.num_dropped += 1
                    continue
                self._waiting[digest] = tenant
            self._changed.notify()

    def close(self, export: Export) -> None:
        """Stop; write what waits still, for a moment. For the engine's thread, whose export needs no other."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                return
        give_up_at = time.monotonic() + CLOSE_S
        while self._waiting and time.monotonic() < give_up_at:
            self._write(export)
        self.num_dropped += len(self._waiting)

    def _run(self) -> None:
        export = self._export
        assert export is not None
        while self._wait():
            before = time.thread_time()
            try:
                self._write(export)
            except Exception as error:  # the engine has stopped, or gives no answer
                self._failures.tell("blocks could not be copied", error)
                with self._changed:
                    self._changed.wait(1.0)
            spent_s = time.thread_time() - before
            self.cpu_s += spent_s
            self._rest(spent_s)

    def _wait(self) -> bool:
        """Until there is something to write; False: the end."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            return not self._is_closed

    def _write(self, export: Export) -> None:
        with self._changed:
            size = max(1, BATCH_BYTES // self._store.block_bytes)
            batch = dict(list(self._waiting.items())[:size])
            for digest in batch:
                del self._waiting[digest]
            self._in_hand = batch
        try:
            found = export(list(batch))
            blocks = [BlockToStore(digest, batch[digest], content) for digest, content in found]
            self.num_dropped += len(batch) - self._store.append(blocks)
        finally:
            self._in_hand = {}

    def _rest(self, spent_s: float) -> None:
        """While requests run, wait until what was spent is a small share of the time."""
        rest_until = time.monotonic() + spent_s / BUSY_SHARE
        while self._is_busy() and (left_s := rest_until - time.monotonic()) > 0:
            with self._changed:
                if self._is_closed:
                    return
                self._changed.wait(min(POLL_S, left_s))
