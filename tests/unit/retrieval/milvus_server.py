"""A Milvus on a socket of this machine, for several processes: milvus-lite as a server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

START_TIMEOUT_S = 60.0


class MilvusServer:
    """`with MilvusServer(folder) as server: MilvusIndex(server.uri, "c")`.

    One worker: the engine of milvus-lite takes no two changes of a collection at once.
    """

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self._folder = folder
        self.process: subprocess.Popen[bytes]

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        where = ("--data-dir", str(self._folder), "--host", "127.0.0.1", "--port", str(self.port))
        command = [sys.executable, "-m", "milvus_lite", "server", *where, "--max-workers", "1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "milvus-lite has ended"
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError("milvus-lite does not listen")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Connections stay, and nobody answers."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> MilvusServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
