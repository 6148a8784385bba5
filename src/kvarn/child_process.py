"""Helper processes that may be killed or stopped by others: whose fault that is, and one more try.

A child that ends by a signal of its own limits (CPU time, memory, stack) was broken by its job. One that was killed,
or that stands still, is no fault of the job: it is tried once more, and then HelperUnavailable. Knows no jobs.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvarn.errors import Cancelled, CapacityError, HelperUnavailable

if TYPE_CHECKING:
    from subprocess import Popen

T = TypeVar("T")
CHECK_S = 0.25  # between two looks whether a child was stopped
STOPPED_S = 1.0  # one that stands still for so long is not waited for
# Of an operator, a supervisor or the kernel's OOM killer; a limit of our own ends with another one.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def retried(attempt: Callable[[], T]) -> T:
    """The result of an attempt; one whose helper process was lost is repeated once."""
    try:
        return attempt()
    except HelperUnavailable:
        return attempt()


def was_killed(returncode: int | None) -> bool:
    """Whether a child was ended from outside."""
    return returncode in [-one for one in _FROM_OUTSIDE]


class StopCheck:
    """Whether a child was stopped by a signal and not continued. For whoever waits for it, every CHECK_S."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since: float | None = None

    def is_stopped(self) -> bool:
        """Whether it has been stopped for STOPPED_S; False where the system does not tell."""
        if not _is_stopped(self._pid):
            self._since = None
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return now - self._since >= STOPPED_S


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] == b"T"


def run_child(
    command: Sequence[str], data: bytes, timeout_s: float, ended: threading.Event | None = None
) -> tuple[int, bytes]:
    """Run a child with data on its stdin: its exit code and its output.

    HelperUnavailable if it was killed or stopped; CapacityError if the machine did not get to it in time; Cancelled
    once ended is set, because nobody waits for it any more.
    """
    import subprocess

    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal must not reach it
        )
    except OSError as error:
        raise HelperUnavailable(f"no helper process could be started: {error}") from error
    with child:
        try:
            output = _output(child, data, time.monotonic() + timeout_s, ended)
        finally:
            child.kill()  # without effect on one that has ended
    if was_killed(child.returncode):
        raise HelperUnavailable("a helper process was killed; try again")
    return child.returncode, output


def exit_code(child: Popen[bytes]) -> int | None:
    """The exit code of a child that has closed its pipes; None if it goes on nevertheless."""
    from subprocess import TimeoutExpired

    try:
        return child.wait(STOPPED_S)
    except TimeoutExpired:
        return None


def _output(child: Popen[bytes], data: bytes, ends_at: float, ended: threading.Event | None) -> bytes:
    from subprocess import TimeoutExpired

    stop = StopCheck(child.pid)
    unsent: bytes | None = data  # what it has not taken at a timeout is sent by the next call
    while True:
        try:
            return child.communicate(unsent, max(0.0, min(CHECK_S, ends_at - time.monotonic())))[0]
        except TimeoutExpired:
            unsent = None
            if ended is not None and ended.is_set():
                raise Cancelled("nobody waits for it any more") from None
            if stop.is_stopped():
                raise HelperUnavailable("a helper process was stopped; try again") from None
            if time.monotonic() >= ends_at:
                raise CapacityError(
                    "the machine is too busy for a helper process; try again", retry_after_s=1.0
                ) from None
