"""A real redis-server for tests: started empty, stopped, frozen, killed."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

START_TIMEOUT_S = 20.0


def require_redis() -> None:
    """Skip where there is none."""
    import pytest

    pytest.importorskip("redis", reason="redis-py is not installed")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class RedisServer:
    """`with RedisServer() as redis: redis.url`. Keeps nothing on disk: one that is started again is empty."""

    def __init__(self, *arguments: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvarn-redis-")
        self._arguments = arguments
        self.port = free_port()
        self.process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self) -> None:
        """Start it, empty, at the same port."""
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (Path(self._folder.name) / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", *fixed, "--dir", self._folder.name, *self._arguments], stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.command("PING") != b"+PONG\r\n":
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """As a lost machine: nothing is told to anybody."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(START_TIMEOUT_S)

    def freeze(self) -> None:
        """It takes connections and answers none."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """The raw reply to one command; b"": there was none."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as one:
                one.sendall(" ".join(words).encode() + b"\r\n")
                return one.recv(65_536)
        except OSError:
            return b""
