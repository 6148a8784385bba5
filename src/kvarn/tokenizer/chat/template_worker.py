"""The serving process's side of the helper process that renders chat templates.

Frames on its pipes, lengths little-endian: request = length (4) + JSON; response = status (1) + length (4) + text.
A worker that uses up its time, breaks or sends malformed frames is killed and replaced; the caller gets TemplateError.
One that was killed or stopped by others is replaced and asked again; the second time it is HelperUnavailable.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvarn.child_process import CHECK_S, StopCheck, exit_code, was_killed
from kvarn.errors import HelperUnavailable, TemplateError

if TYPE_CHECKING:
    from subprocess import Popen

MAX_REQUEST_BYTES = 16 << 20  # twice what a server takes by default: marks are added, and the template itself
MAX_RESPONSE_BYTES = (16 << 20) + 4096
REMEDY = "change the messages, or give a text to continue instead of them"


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """The resources one rendering may use."""

    deadline_s: float = 0.2  # of CPU time; of wall time where the system does not report CPU time
    max_wait_s: float = 10.0  # beyond that in wall time, when the worker does not get the CPU
    bytes_per_s: int = 20_000_000  # long conversations get that much more time
    start_s: float = 10.0
    memory_bytes: int = 96 << 20  # beyond what the idle worker has mapped
    fuel: int = 5_000_000  # steps of minijinja's machine


class TemplateWorker:
    """Starts, calls, kills and replaces the helper process. Safe to use from several threads and after a fork."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._is_ready = False
        drop = weakref.WeakMethod(self._drop_after_fork)
        os.register_at_fork(after_in_child=lambda: (method := drop()) and method())

    def start(self) -> None:
        """Start the process if there is none; return at once, while it gets ready."""
        with self._lock:
            self._ensure_started()

    def render(self, template: str, context: Mapping[str, Any]) -> str:
        """Return the template rendered with context, or raise TemplateError."""
        request = _serialise({"template": template, "context": context})
        with self._lock:
            try:
                return self._request(request)
            except HelperUnavailable:  # lost: the next one is new
                return self._request(request)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()

    def _request(self, request: bytes) -> str:
        process = self._ensure_started()
        self._await_ready(process)
        cpu_s = self._limits.deadline_s + len(request) / self._limits.bytes_per_s
        deadline = CpuDeadline(process.pid, cpu_s, self._limits.max_wait_s)
        self._send(process, len(request).to_bytes(4, "little") + request, deadline)
        status, text = self._receive(process, deadline, f"took longer than {cpu_s:.1f} s")
        if status != 0:
            raise TemplateError(f"the model's chat template cannot write this conversation: {text}; {REMEDY}")
        return text

    def _await_ready(self, process: Popen[bytes]) -> None:
        if self._is_ready:
            return
        try:
            self._receive(process, CpuDeadline(process.pid, self._limits.start_s, 0.0), "did not start")
        except TemplateError:  # no conversation was sent yet
            self._lose("did not start")
        self._is_ready = True

    def _ensure_started(self) -> Popen[bytes]:
        if self._process is None:
            self._process = _spawn(self._limits)
            self._is_ready = False
        return self._process

    def _send(self, process: Popen[bytes], data: bytes, deadline: CpuDeadline) -> None:
        assert process.stdin is not None
        target = process.stdin.fileno()
        unsent = memoryview(data)
        while unsent:
            if not deadline.wait(target, select.POLLOUT):
                self._lose("was not ready in time")
            try:
                unsent = unsent[os.write(target, unsent[:65536]) :]
            except BrokenPipeError:
                self._lose("has died")

    def _receive(self, process: Popen[bytes], deadline: CpuDeadline, timeout_reason: str) -> tuple[int, str]:
        assert process.stdout is not None
        head = self._read(process.stdout.fileno(), 5, deadline, timeout_reason)
        length = int.from_bytes(head[1:], "little")
        if length > MAX_RESPONSE_BYTES:
            self._restart_and_raise(f"wrote {length:,} bytes")
        return head[0], self._read(process.stdout.fileno(), length, deadline, timeout_reason).decode("utf-8", "replace")

    def _read(self, source: int, count: int, deadline: CpuDeadline, timeout_reason: str) -> bytes:
        received = bytearray()
        while len(received) < count:
            if not deadline.wait(source, select.POLLIN):
                if not deadline.is_used_up:
                    self._lose("stood still")
                self._restart_and_raise(timeout_reason)
            chunk = os.read(source, min(count - len(received), 1 << 20))
            if not chunk:
                if self._process is not None and was_killed(exit_code(self._process)):
                    self._lose("was killed")
                self._restart_and_raise("broke its helper process, most likely by using too much memory,")
            received += chunk
        return bytes(received)

    def _restart_and_raise(self, what: str) -> NoReturn:
        self._kill()
        self._process = _spawn(self._limits)  # so that the next caller does not wait for the start
        self._is_ready = False
        raise TemplateError(f"the model's chat template {what} and was stopped; {REMEDY}")

    def _lose(self, what: str) -> NoReturn:
        self._kill()
        raise HelperUnavailable(f"the process that renders chat templates {what}; try again")

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()

    def _drop_after_fork(self) -> None:
        """In a forked child the process is the parent's, and the lock may be held by a thread that was not forked."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is None:
            return
        process.returncode = 0  # it is not a child of this process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class CpuDeadline:
    """How long the worker may take: cpu_s of CPU time, and at most max_wait_s longer than that in wall time.

    Engines may keep every core busy, and a conversation must not be refused for that.
    """

    def __init__(self, pid: int, cpu_s: float, max_wait_s: float) -> None:
        self._pid = pid
        self._stop = StopCheck(pid)
        self._cpu_s = cpu_s
        self._cpu_time_before_s = _cpu_time_s(pid)
        self._deadline = time.monotonic() + cpu_s
        self._latest = self._deadline + max_wait_s
        self.is_used_up = False  # whether the worker took the time; else it was stopped, or never got the CPU

    def wait(self, pipe: int, event: int) -> bool:
        """Wait until a pipe is ready; False when the time is over, or the worker stopped."""
        poller = select.poll()
        poller.register(pipe, event)
        while True:
            if poller.poll(min(CHECK_S, max(0.0, self._deadline - time.monotonic())) * 1000):
                return True
            if self._stop.is_stopped():
                return False
            if time.monotonic() < self._deadline:
                continue
            left_s = self._left_s()
            self.is_used_up = left_s <= 0
            if self.is_used_up or time.monotonic() >= self._latest:
                return False
            self._deadline = min(time.monotonic() + left_s, self._latest)

    def _left_s(self) -> float:
        """CPU time that is left; none where the system does not report it."""
        cpu_time_s = _cpu_time_s(self._pid)
        if cpu_time_s is None or self._cpu_time_before_s is None:
            return 0.0
        return self._cpu_s - (cpu_time_s - self._cpu_time_before_s)


@cache
def shared_worker() -> TemplateWorker:
    """Return this process's worker; it is not started yet."""
    return _until_exit(TemplateWorker())


@cache
def worker_for_long() -> TemplateWorker:
    """Return the worker of long conversations: others need not wait until one is rendered."""
    return _until_exit(TemplateWorker())


def _until_exit(worker: TemplateWorker) -> TemplateWorker:
    atexit.register(worker.close)
    return worker


def _spawn(limits: TemplateLimits) -> Popen[bytes]:
    import subprocess
    from importlib.util import find_spec

    spec = find_spec("minijinja")
    if spec is None or spec.origin is None:
        raise TemplateError("the package minijinja is not installed; chat templates need it: pip install minijinja")
    script = Path(__file__).with_name("template_child.py")
    packages = Path(spec.origin).parent.parent
    command = [sys.executable, "-I", "-S", "-B", str(script), str(packages), str(limits.memory_bytes), str(limits.fuel)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/" if os.name == "posix" else None,
        start_new_session=True,  # Ctrl-C in a terminal must not reach it
    )


def _cpu_time_s(pid: int) -> float | None:
    """CPU time a process has used; None where the system does not report it."""
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux's clock of a process, as clock_getcpuclockid(3) makes it
    except OSError:
        return None


def _serialise(request: Mapping[str, Any]) -> bytes:
    try:
        data = json.dumps(request, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise TemplateError(f"the conversation cannot be written as JSON: {str(error)[:120]}") from error
    if len(data) > MAX_REQUEST_BYTES:
        raise TemplateError(f"the conversation has {len(data):,} bytes, at most {MAX_REQUEST_BYTES:,} are allowed")
    return data
