"""The one helper process that renders chat templates, as seen from the serving process.

Frames on its pipes, lengths little-endian: request = length (4) + JSON; answer = status (1) + length (4) + text.
A worker that is late, dies or talks nonsense is killed and replaced; the caller gets TemplateError.
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
from typing import TYPE_CHECKING, Any

from kvarn.errors import TemplateError

if TYPE_CHECKING:
    from subprocess import Popen

MAX_REQUEST_BYTES = 8 << 20
MAX_ANSWER_BYTES = (8 << 20) + 4096
INSTEAD = "change the messages, or give a text to continue instead of them"


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may cost."""

    deadline_s: float = 0.2  # of computing; of waiting where the system does not tell the two apart
    patience_s: float = 10.0  # of waiting, on a machine that has no time for the worker
    bytes_per_s: int = 20_000_000  # long conversations get that much more time
    start_s: float = 10.0
    memory_bytes: int = 96 << 20  # beyond what the idle worker has mapped
    fuel: int = 5_000_000  # steps of minijinja's machine


class TemplateWorker:
    """Starts, asks, kills and replaces the helper process. Safe to use from several threads and after a fork."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._is_ready = False
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def start(self) -> None:
        """Start the process if there is none; return at once, while it gets ready."""
        with self._lock:
            self._ensure_started()

    def render(self, template: str, context: Mapping[str, Any]) -> str:
        """Return the template rendered with context, or raise TemplateError."""
        request = _written({"template": template, "context": context})
        with self._lock:
            try:
                return self._ask(request)
            except BrokenPipeError:  # it died while idle and has not seen the request: ask a new one
                self._kill()
                return self._ask(request)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()

    def _ask(self, request: bytes) -> str:
        process = self._ensure_started()
        if not self._is_ready:
            self._receive(process, Allowance(process.pid, self._limits.start_s, 0.0), "did not start")
            self._is_ready = True
        allowed_s = self._limits.deadline_s + len(request) / self._limits.bytes_per_s
        allowance = Allowance(process.pid, allowed_s, self._limits.patience_s)
        self._send(process, len(request).to_bytes(4, "little") + request, allowance)
        status, text = self._receive(process, allowance, f"took longer than {allowed_s:.1f} s")
        if status != 0:
            raise TemplateError(f"the model's chat template cannot write this conversation: {text}; {INSTEAD}")
        return text

    def _ensure_started(self) -> Popen[bytes]:
        if self._process is None:
            self._process = _spawn(self._limits)
            self._is_ready = False
        return self._process

    def _send(self, process: Popen[bytes], data: bytes, allowance: Allowance) -> None:
        assert process.stdin is not None
        target = process.stdin.fileno()
        unsent = memoryview(data)
        while unsent:
            if not allowance.wait(target, select.POLLOUT):
                self._give_up("was not ready in time")
            unsent = unsent[os.write(target, unsent[:65536]) :]

    def _receive(self, process: Popen[bytes], allowance: Allowance, lateness: str) -> tuple[int, str]:
        assert process.stdout is not None
        head = self._read(process.stdout.fileno(), 5, allowance, lateness)
        length = int.from_bytes(head[1:], "little")
        if length > MAX_ANSWER_BYTES:
            self._give_up(f"wrote {length:,} bytes")
        return head[0], self._read(process.stdout.fileno(), length, allowance, lateness).decode("utf-8", "replace")

    def _read(self, source: int, count: int, allowance: Allowance, lateness: str) -> bytes:
        received = bytearray()
        while len(received) < count:
            if not allowance.wait(source, select.POLLIN):
                self._give_up(lateness)
            chunk = os.read(source, min(count - len(received), 1 << 20))
            if not chunk:
                self._give_up("broke its helper process, most likely by using too much memory,")
            received += chunk
        return bytes(received)

    def _give_up(self, what: str) -> None:
        self._kill()
        self._process = _spawn(self._limits)  # so that the next caller need not wait
        self._is_ready = False
        raise TemplateError(f"the model's chat template {what} and was stopped; {INSTEAD}")

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()

    def _forget(self) -> None:
        """In a forked child: the process belongs to the parent, and a lock may be held by a thread that is not here."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is None:
            return
        process.returncode = 0  # not ours to wait for
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class Allowance:
    """How long the worker may take: until it has computed for allowed_s, or patience_s if it does not get to compute.

    Engines may keep every core busy, and a conversation must not be refused for that.
    """

    def __init__(self, pid: int, allowed_s: float, patience_s: float) -> None:
        self._pid = pid
        self._allowed_s = allowed_s
        self._computed_before_s = _computed_s(pid)
        self._deadline = time.monotonic() + allowed_s
        self._last = self._deadline + patience_s

    def wait(self, pipe: int, event: int) -> bool:
        """Wait until a pipe is ready; False when the worker has had its time."""
        poller = select.poll()
        poller.register(pipe, event)
        while True:
            if poller.poll(max(0.0, self._deadline - time.monotonic()) * 1000):
                return True
            left_s = self._left_s()
            if left_s <= 0:
                return False
            self._deadline = min(time.monotonic() + left_s, self._last)

    def _left_s(self) -> float:
        computed_s = _computed_s(self._pid)
        if computed_s is None or self._computed_before_s is None or time.monotonic() >= self._last:
            return 0.0
        return self._allowed_s - (computed_s - self._computed_before_s)


@cache
def shared_worker() -> TemplateWorker:
    """Return this process's worker; it is not started yet."""
    worker = TemplateWorker()
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
        start_new_session=True,  # Ctrl-C in a terminal is for us, not for it
    )


def _computed_s(pid: int) -> float | None:
    """Processor time a process has used; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux's clock of a process, as clock_getcpuclockid(3) makes it
    except OSError:
        return None


def _written(request: Mapping[str, Any]) -> bytes:
    try:
        data = json.dumps(request, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise TemplateError(f"the conversation cannot be written as JSON: {str(error)[:120]}") from error
    if len(data) > MAX_REQUEST_BYTES:
        raise TemplateError(f"the conversation has {len(data):,} bytes, at most {MAX_REQUEST_BYTES:,} are allowed")
    return data
