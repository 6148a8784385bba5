"""The processes of the other ranks, from rank 0's side: started, told what to do, watched, ended.

    rank 0 ──commands, pickled──> worker.py of every other rank ──"done", or why it failed──> watching thread
A worker that dies, is stopped or fails takes all ranks with it, because each sum needs all of them. Workers end when
their pipe does, so also with a rank 0 that was killed.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from kvarn.backends.torch.device import Device
from kvarn.backends.torch.parallel.groups import Ranks, connect
from kvarn.backends.torch.parallel.shards import ParallelShape, RankPlace
from kvarn.child_process import CHECK_S, StopCheck, exit_code, was_killed
from kvarn.errors import BackendError, DeviceLost

WORKER = "kvarn.backends.torch.parallel.worker"
STOP_TIMEOUT_S = 5.0  # for workers to end by themselves
CAUSE_S = 2.0  # after a sum has failed, for the death of a worker to be noticed: it is the better reason


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank needs to join the others."""

    place: RankPlace
    device: Device
    threads: int
    store: Path  # a file in which ranks leave their addresses
    timeout_s: float  # of one exchange


class Workers:
    """All ranks but this one."""

    def __init__(self, setups: Sequence[RankSetup]) -> None:
        self.failure: DeviceLost | None = None  # why nothing will be computed any more
        self.release: Callable[[], None] | None = None  # lets go of a sum that waits for a rank that is gone
        self._has_failed = threading.Event()
        self._is_closing = False
        self._lock = threading.Lock()
        self._done: SimpleQueue[str] = SimpleQueue()
        self._children: list[_Child] = []
        self._watcher = threading.Thread(target=self._watch, name="kvarn-ranks", daemon=True)
        try:
            for setup in setups:
                self._children.append(_Child(setup))
        except OSError as error:
            self.close()
            raise BackendError(f"no worker process could be started: {error}") from error
        self._watcher.start()

    def tell(self, method: str, *arguments: Any, num_ranks: int | None = None) -> None:
        """Have a method of every rank called, or of the first so many ranks (this one included) only."""
        for child in self._children[: None if num_ranks is None else num_ranks - 1]:
            child.connection.send((method, arguments))

    def await_done(self) -> None:
        """Wait until every worker has done what it was told with an answer."""
        for _ in self._children:
            while True:
                if self.failure is not None:
                    raise self.error()
                with suppress(Empty):
                    self._done.get(timeout=CHECK_S)
                    break

    def error(self) -> DeviceLost:
        """The failure, to be raised."""
        return DeviceLost(str(self.failure))

    def fail(self, reason: str) -> None:
        """Nothing can be computed any more: end all workers, so that whoever waits for them is released."""
        with self._lock:
            if self.failure is None and not self._is_closing:
                self.failure = DeviceLost(reason)
        for child in self._children:
            child.process.kill()
        if self.release is not None and not self._has_failed.is_set():
            self.release()
        self._has_failed.set()

    def fail_after(self, error: BaseException) -> DeviceLost:
        """The failure behind an exception of this rank's own computation: a worker's death, or the exception."""
        if not self._has_failed.wait(CAUSE_S):
            self.fail(f"rank 0 failed: {error or type(error).__name__}")
        return self.error()

    def close(self) -> None:
        """End all workers and wait for them."""
        self._is_closing = True
        for child in self._children:
            with suppress(OSError):
                child.connection.send(("close", ()))
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(STOP_TIMEOUT_S if self.failure is None else 0.0)
            child.process.kill()  # without effect on one that has ended
            child.process.wait()
        if self._watcher.is_alive():
            self._watcher.join(STOP_TIMEOUT_S)
        for child in self._children:
            child.connection.close()

    def _watch(self) -> None:
        while not self._is_closing and self.failure is None:
            ready = wait([child.connection for child in self._children], CHECK_S)
            for child in self._children:
                if child.connection in ready:
                    self._read(child)
                elif child.stop.is_stopped():
                    self.fail(f"{child.title} was stopped by a signal")

    def _read(self, child: _Child) -> None:
        try:
            outcome, text = child.connection.recv()
        except (EOFError, OSError):
            outcome, text = "ended", _how(exit_code(child.process))
        if outcome == "done":
            self._done.put(text)
        elif not self._is_closing:
            killed = next((one for one in self._children if was_killed(one.process.poll())), None)
            # A rank that fails because another was killed is not the reason.
            self.fail(f"{child.title} {text}" if killed is None else f"{killed.title} {_how(killed.process.poll())}")


class World:
    """All ranks as rank 0 sees them: its own connections, and the other processes."""

    def __init__(self, shape: ParallelShape, devices: Sequence[Device], threads: int, timeout_s: float) -> None:
        """threads are divided among ranks that share the CPU."""
        self.shape = shape
        self.device = devices[0]
        self.threads = max(1, threads // shape.num_ranks)
        self._folder = tempfile.TemporaryDirectory(prefix="kvarn-ranks-", ignore_cleanup_errors=True)
        store = Path(self._folder.name) / "store"
        setups = [
            RankSetup(shape.place(rank), device, self.threads, store, timeout_s) for rank, device in enumerate(devices)
        ]
        self.workers = Workers(setups[1:])
        try:
            self.workers.await_done()  # they have imported torch: from here on it is milliseconds
            self.ranks: Ranks = connect(setups[0].place, setups[0].device, store, timeout_s)
            self.workers.release = self.ranks.abort
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers; the connections end with the last reference to them."""
        self.workers.close()
        self._folder.cleanup()


class _Child:
    """One worker process and the pipe to it."""

    def __init__(self, setup: RankSetup) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints must not mix with answers
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal must not reach it
            )
            self.connection: Connection = Connection(ours.detach())
        place = setup.place
        self.title = f"worker {place.rank} of {place.shape.num_ranks} ranks (process {self.process.pid})"
        self.stop = StopCheck(self.process.pid)
        with suppress(OSError):  # it has died already: the watching thread finds out
            self.connection.send(setup)


def _how(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
