"""Real `kvarn deploy ray` processes on clusters of several nodes on this machine, and what they tell of themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.process import ROOT

START_TIMEOUT_S = 240.0  # Ray on a loaded machine
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_DEDUP_LOGS": "0",
}


class RayServer:
    """`with RayServer(address, "--model", ...) as server: httpx.get(server.url + "/health")`."""

    def __init__(self, address: str, *args: str, folder: Path) -> None:
        command = [sys.executable, "-m", "kvarn.cli.main", "deploy", "ray", "--address", address, "--port", "0"]
        self._command = [*command, "--threads", "1", *args]
        self._log = folder / "deploy.log"
        self.url = ""

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> RayServer:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | ENVIRONMENT
            )
        try:
            until(lambda: "kvarn: serving" in self.log or self.process.poll() is not None, START_TIMEOUT_S)
            line = next(line for line in self.log.splitlines() if line.startswith("kvarn: serving"))
        except BaseException:
            print(self.log[-6000:], file=sys.stderr)
            self.process.kill()
            raise
        self.url = line.rpartition(" on ")[2].strip()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            print(self.log[-8000:], file=sys.stderr)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(START_TIMEOUT_S)
            finally:
                self.process.kill()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120.0, trust_env=False, **options)

    def num_usable(self, model: str = "tiny") -> int:
        """Replicas of a model that may be asked."""
        count: int = httpx.get(self.url + "/health/live", trust_env=False, timeout=60.0).json()["replicas"][model]
        return count


@contextmanager
def ray_nodes(number: int) -> Iterator[tuple[str, Callable[[str], None]]]:
    """A cluster; its address, and what tells it `kill`."""
    with tempfile.TemporaryDirectory(
        prefix="kr", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:  # Unix sockets are short
        nodes = subprocess.Popen(
            [sys.executable, "-m", "tests.server.ray_nodes", str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | {"RAY_TMPDIR": folder},
            text=True,
            start_new_session=True,  # whatever Ray leaves behind is of this group
        )
        assert nodes.stdin is not None
        assert nodes.stdout is not None

        def tell(word: str) -> None:
            assert nodes.stdin is not None
            assert nodes.stdout is not None
            nodes.stdin.write(word + "\n")
            nodes.stdin.flush()
            nodes.stdout.readline()

        try:
            address = nodes.stdout.readline().strip()
            assert address, "the Ray cluster did not start"
            yield address, tell
        finally:
            nodes.stdin.close()
            try:
                nodes.wait(60.0)
            except subprocess.TimeoutExpired:
                os.killpg(nodes.pid, signal.SIGKILL)
                nodes.wait()


def until(is_so: Callable[[], bool], timeout_s: float, every_s: float = 0.1) -> None:
    """Wait for a condition."""
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"it did not become so within {timeout_s:g} s"
        time.sleep(every_s)
