"""Real `kvarn route` processes before real servers of a tiny model, for tests and measurements."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.chat_model import write_chat_model
from tests.server.process import ROOT, START_TIMEOUT_S, STOP_TIMEOUT_S, ServerProcess

MODEL = "tiny"
SERVER = "kvarn.cli.main"
CHAT = "/v1/chat/completions"
REPLICA = "x-kvarn-replica"


class RouterProcess:
    """`with RouterProcess(key, [server.url, ...]) as router: httpx.get(router.url + "/health")`."""

    def __init__(self, key: Path, urls: Sequence[str], *args: str, module: str = SERVER) -> None:
        replicas = [part for url in urls for part in ("--replica", url)]
        command = [sys.executable, "-m", module, "route", "--port", "0", "--cluster-key", os.fspath(key)]
        self._command = [*command, *replicas, *args]
        self._log = tempfile.NamedTemporaryFile(prefix="kvarn-router-", suffix=".log")  # noqa: SIM115 - as long as the process
        self.process: subprocess.Popen[str]
        self.url = self.line = ""

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, trust_env=False, **options)

    def __enter__(self) -> RouterProcess:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self._log, cwd=ROOT, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.url = self.line.rpartition(" on ")[2].strip()
        assert self.url, f"kvarn route did not start: {self.log[-4000:]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGTERM)  # the second one ends it at once
            self.process.wait(STOP_TIMEOUT_S)
        if error is not None:
            print(f"--- the router's log ---\n{self.log[-8000:]}", file=sys.stderr)

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = httpx.get(self.url + "/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))

    def until_usable(self, number: int) -> None:
        """Wait until so many replicas may be asked."""
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            answer = httpx.get(self.url + "/health", trust_env=False).json()
            if answer["replicas"]["usable"] == number:
                return
            time.sleep(0.05)
        raise AssertionError(f"{number} usable replicas were expected: {self.log[-2000:]}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Replicas behind a router."""

    router: RouterProcess
    replicas: list[ServerProcess]


def cluster_files(folder: Path) -> tuple[Path, Path]:
    """A model and a key."""
    key = folder / "cluster.key"
    key.write_text("5" * 64 + "\n", encoding="utf-8")
    return write_chat_model(folder / "tiny.gguf"), key


def replica(model: Path, key: Path, *args: str, keys: Path | None = None, module: str = SERVER) -> ServerProcess:
    """A server of the cluster; `--port` may be given again."""
    options = ("--model", f"{MODEL}={model}", "--cluster-key", key, "--threads", "1", *args)
    return ServerProcess(*options, keys=keys, module=module)


@contextmanager
def cluster(
    folder: Path, number: int = 2, *args: str, keys: Path | None = None, module: str = SERVER
) -> Iterator[Cluster]:
    """So many replicas and a router; args are the router's, module what the replicas run."""
    model, key = cluster_files(folder)
    with ExitStack() as stack:
        replicas = [replica(model, key, keys=keys, module=module) for _ in range(number)]
        with ThreadPoolExecutor(number) as threads:
            list(threads.map(stack.enter_context, replicas))
        router = stack.enter_context(RouterProcess(key, [one.url for one in replicas], *args))
        router.until_usable(number)
        yield Cluster(router, replicas)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0} | (
        fields
    )


def converse(client: httpx.Client, num_conversations: int, num_turns: int, salt: str) -> tuple[int, int]:
    """Conversations with one system prompt, a turn of each in any order; cached and all prompt tokens.

    salt: of the prefix cache, so that it holds nothing of others.
    """
    order = random.Random(11)
    system = {"role": "system", "content": "You are terse and kind, and you know a lot. " * 6}
    talks: list[list[dict[str, str]]] = [[system] for _ in range(num_conversations)]
    cached = total = 0
    for turn in range(num_turns):
        for number in order.sample(range(num_conversations), num_conversations):
            talk = talks[number]
            talk.append({"role": "user", "content": f"Question {turn} of talk {number}: what is {number * turn}? " * 2})
            answer = client.post(CHAT, json=body("", messages=talk, max_tokens=8, cache_salt=salt))
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]
            talk.append({"role": "assistant", "content": f"It is {number * turn}, I think."})
    return cached, total
