"""A real `kvarn serve` process for tests: started, asked over its socket, stopped by signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx

from tests.assets import cache_folder, minilm, smollm2

START_TIMEOUT_S = 120.0  # on a busy machine
STOP_TIMEOUT_S = 60.0
# On a busy machine the watchdog's five seconds may pass before a healthy server is scheduled again.
PATIENT = {"KVARN_SERVER_HEARTBEAT_TIMEOUT_S": "60"}
SMOLLM2, MINILM = "smollm2", "minilm"
ROOT = Path(__file__).resolve().parents[2]


def model_path(name: str) -> Path:
    """A path to one of the models of tests/assets.py whose last part is its alias, so that the server calls it so."""
    real = {SMOLLM2: smollm2, MINILM: minilm}[name]()
    link = cache_folder() / "served" / name
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        with suppress(FileExistsError):
            link.symlink_to(real)
    return link


class ServerProcess:
    """`with ServerProcess("--model", path) as server: httpx.get(server.url + "/health")`.

    args: further arguments of `kvarn serve`; config: the text of a TOML file; keys: the path of a key file; env:
    variables to add; module: what `python -m` starts instead (tests.server.faulty); is_patient: a watchdog with more
    time than by default, unless config says how much; prefix: a command that runs the one after it, as another user.
    """

    def __init__(
        self,
        *args: str | os.PathLike[str],
        config: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        module: str = "kvarn.cli.main",
        waits: bool = True,
        is_patient: bool = True,
        prefix: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvarn-server-")
        folder = Path(self._folder.name)
        command = [*prefix, sys.executable, "-m", module, "serve", "--port", "0", *(os.fspath(arg) for arg in args)]
        if config is not None:
            (folder / "server.toml").write_text(config, encoding="utf-8")
            command += ["--config", str(folder / "server.toml")]
        if keys is not None:
            command += ["--keys", os.fspath(keys)]
        self._command = command
        prefixes = {"KVARN_SERVER_ENGINE_PREFIX_CACHE_DIR": str(folder / "prefixes")}
        patience = PATIENT if is_patient and "heartbeat_timeout_s" not in (config or "") else {}
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", **prefixes, **patience, **(env or {})}
        self._waits = waits
        self._log_path = folder / "stderr.log"
        self._lines: list[str] = []
        self._has_spoken = threading.Event()
        self._kept_log: str | None = None
        self.started_s = 0.0
        self.process: subprocess.Popen[str]
        self.port = 0
        self.address = ""  # as the ready line has it

    @property
    def url(self) -> str:
        scheme = "https" if self.address.startswith("https:") else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """Everything on stderr up to now."""
        if self._kept_log is not None:
            return self._kept_log
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def output(self) -> str:
        """Everything on stdout up to now."""
        return "".join(self._lines)

    def client(self, **options: object) -> httpx.Client:
        """An HTTP client for this server, without the proxies of the environment."""
        return httpx.Client(base_url=self.url, timeout=60.0, trust_env=False, **options)  # type: ignore[arg-type]

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGTERM)  # the second one ends it at once
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_TIMEOUT_S)
        self._kept_log = self.log
        self._folder.cleanup()
        if error is not None and self._kept_log:
            print(f"--- the server's log ---\n{self._kept_log[-8000:]}", file=sys.stderr)

    def start(self) -> None:
        """Start the process and wait for its ready line."""
        began = time.monotonic()
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, env=self._env, cwd=ROOT, text=True
            )
        threading.Thread(target=self._read, daemon=True).start()
        if not self._waits:
            return
        if not self._has_spoken.wait(START_TIMEOUT_S) or not self.address:
            code = self.process.poll()
            if code is None:
                self.process.kill()
            raise AssertionError(f"kvarn serve did not start (exit code {code}): {self.output}{self.log[-4000:]}")
        self.started_s = time.monotonic() - began

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(signum)
        return self.process.wait(timeout_s)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            _, found, address = line.rstrip().rpartition(" on ")
            if line.startswith("kvarn: serving ") and found:
                self.port = 0 if address.startswith("unix:") else int(address.rpartition(":")[2])
                self.address = address
                self._has_spoken.set()
        self._has_spoken.set()  # ended without a word
