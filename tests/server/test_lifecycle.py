"""From starting to stopped: what each phase means for requests, and what health says about it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvarn.server.access.auth import Authenticator
from kvarn.server.access.keys import KeyRing
from kvarn.server.http.cors import BrowserPolicy
from kvarn.server.http.pipeline import RequestPipeline
from kvarn.server.http.traffic import Traffic
from kvarn.server.process.lifecycle import Lifecycle, NotReady, Phase, ShuttingDown, is_probe
from kvarn.server.process.settings import ServerConfig
from tests.server.process import SMOLLM2, ServerProcess, model_path

Message = dict[str, Any]


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def _in_phase(phase: Phase) -> Lifecycle:
    lifecycle = Lifecycle()
    if phase != "starting":
        lifecycle.become_ready()
    if phase not in ("starting", "ready"):
        lifecycle.drain()
    if phase in ("refusing", "stopped"):
        lifecycle.refuse()
    if phase == "stopped":
        lifecycle.stop()
    return lifecycle


@pytest.mark.parametrize(
    ("phase", "accepts", "is_ready", "closes"),
    [
        ("starting", False, False, False),
        ("ready", True, True, False),
        ("draining", True, False, False),
        ("refusing", False, False, True),
        ("stopped", False, False, True),
    ],
)
def test_each_phase_says_what_it_does(phase: Phase, accepts: bool, is_ready: bool, closes: bool) -> None:
    lifecycle = _in_phase(phase)
    assert lifecycle.phase == phase
    assert (lifecycle.accepts_requests, lifecycle.is_ready, lifecycle.closes_connections) == (accepts, is_ready, closes)


def test_a_refusal_tells_starting_from_ending() -> None:
    assert isinstance(_in_phase("starting").refusal(), NotReady)
    assert _in_phase("draining").refusal() is None
    assert isinstance(_in_phase("refusing").refusal(), ShuttingDown)


def test_steps_of_starting_up_carry_their_time() -> None:
    clock = Clock()
    lifecycle = Lifecycle(clock)
    lifecycle.begin_step("find", "m")
    clock.now += 2
    lifecycle.begin_step("load", "m")
    assert [(step.name, step.seconds) for step in lifecycle.steps] == [("find", 2.0), ("load", None)]
    clock.now += 3
    lifecycle.become_ready()
    assert [(step.name, step.seconds) for step in lifecycle.steps] == [("find", 2.0), ("load", 3.0)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/health", True), ("/health/live", True), ("/metrics", True), ("/healthy", False), ("/v1/models", False)],
)
def test_only_health_and_metrics_answer_in_every_phase(path: str, expected: bool) -> None:
    assert is_probe(path) is expected


def _through(lifecycle: Lifecycle, path: str, app: Any) -> list[Message]:
    """Send one request through the pipeline; how its response begins."""
    sent: list[Message] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    pipeline = RequestPipeline(
        app,
        browsers=BrowserPolicy(ServerConfig()),
        auth=Authenticator(KeyRing(None), takes_local=True),
        lifecycle=lifecycle,
        traffic=Traffic(),
    )
    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b""}
    asyncio.run(pipeline(scope, receive, send))
    return [message for message in sent if message["type"] == "http.response.start"]


async def _fine(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"connection", b"keep-alive"), (b"x", b"y")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


def test_requests_are_refused_and_health_passes() -> None:
    lifecycle = _in_phase("refusing")
    (refused,) = _through(lifecycle, "/v1/models", _fine)
    (passed,) = _through(lifecycle, "/health/live", _fine)
    assert (refused["status"], passed["status"]) == (503, 200)
    assert [value for name, value in refused["headers"] if name == b"connection"] == [b"close"]
    assert [value for name, value in passed["headers"] if name == b"connection"] == [b"close"]


def test_before_the_end_connections_are_left_alone() -> None:
    (passed,) = _through(_in_phase("draining"), "/v1/models", _fine)
    assert dict(passed["headers"])[b"connection"] == b"keep-alive"


def test_requests_count_until_they_end_however_they_end() -> None:
    lifecycle = _in_phase("ready")
    seen = []

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        seen.append(lifecycle.num_requests)
        raise RuntimeError("on purpose")

    (failed,) = _through(lifecycle, "/v1/models", failing)
    assert failed["status"] == 500
    assert seen == [1]
    assert lifecycle.num_requests == 0


def test_waiting_for_idle_ends_with_the_last_request() -> None:
    async def main() -> None:
        lifecycle = _in_phase("ready")
        first, second = lifecycle.counted_request(), lifecycle.counted_request()
        first.__enter__()
        second.__enter__()
        waiting = asyncio.create_task(lifecycle.until_idle())
        first.__exit__(None, None, None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        second.__exit__(None, None, None)
        await asyncio.wait_for(waiting, 10)

    asyncio.run(main())


@pytest.mark.parametrize("is_cancelled_too", [False, True])
def test_what_is_awaited_at_the_stop_ends_and_a_cancellation_stays_one(is_cancelled_too: bool) -> None:
    async def main() -> None:
        lifecycle = _in_phase("refusing")

        async def wait() -> None:
            with lifecycle.ends_at_stop():
                await asyncio.sleep(60)

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        lifecycle.stop()
        if is_cancelled_too:
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled_too else ShuttingDown):
            await waiting
        with pytest.raises(ShuttingDown):
            await wait()

    asyncio.run(main())


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.model
def test_startup_is_told_step_by_step_and_ready_comes_after_a_real_token(patience: float) -> None:
    port = _free_port()
    arguments = ("--model", model_path(SMOLLM2), "--context", "512", "--port", str(port))
    with ServerProcess(*arguments, waits=False, module="tests.server.faulty") as server:
        server.port = port
        seen = _watch_startup(server, 60 * patience)
        with server.client() as http:
            figures = http.get("/fault/state").json()
            startup = http.get("/health/startup").json()
        output = server.output
    assert "starting" in {phase for phase, _ in seen}, "health answers before the model is loaded"
    assert {status for phase, status in seen if phase == "starting"} == {503}
    assert figures["generated_tokens"] >= 1, "the warm-up computed a token before the first request"
    assert [step["name"] for step in startup["steps"]] == [f"find {SMOLLM2}", f"load {SMOLLM2}"]
    assert all(step["seconds"] >= 0 for step in startup["steps"])
    assert output == f"kvarn: serving {SMOLLM2} on http://127.0.0.1:{port}\n"


def _watch_startup(server: ServerProcess, timeout_s: float) -> list[tuple[str, int]]:
    """(phase, status of a request) until the server is ready."""
    seen = []
    ends_at = time.monotonic() + timeout_s
    with server.client() as http:
        while time.monotonic() < ends_at:
            try:
                asked = http.get("/v1/models")
                ready = http.get("/health/ready")  # afterwards: one that is still starting was so when it was asked
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            seen.append((ready.json()["phase"], asked.status_code if ready.status_code == 503 else 200))
            if ready.status_code == 200:
                return seen
            assert asked.status_code == 200 or asked.headers["retry-after"] == "1"
            time.sleep(0.05)
    raise AssertionError(f"the server did not become ready: {server.log[-2000:]}")


@pytest.mark.model
def test_a_signal_while_starting_ends_the_process_cleanly(patience: float) -> None:
    port = _free_port()
    arguments = ("--model", model_path(SMOLLM2), "--port", str(port))
    with ServerProcess(*arguments, waits=False) as server:
        server.port = port
        _until_it_listens(server, 60 * patience)
        assert server.stop(timeout_s=20 * patience) == 0


def _until_it_listens(server: ServerProcess, timeout_s: float) -> None:
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        try:
            httpx.get(server.url + "/health/startup", trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.02)
    raise AssertionError("the server does not listen")


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    """A server that runs one request at a time and lets one wait."""
    config = "queue_limit = 1\n[engine]\nmax_running = 1\ncontext = 512\n"
    with ServerProcess("--model", model_path(SMOLLM2), config=config, module="tests.server.faulty") as process:
        yield process


@pytest.mark.model
def test_a_full_queue_is_not_ready_but_alive(narrow: ServerProcess, patience: float) -> None:
    body = {"model": SMOLLM2, "prompt": "Hello", "max_tokens": 40, "ignore_eos": True}
    with narrow.client() as http, ThreadPoolExecutor(2) as threads:

        def ask() -> httpx.Response:
            while (answer := http.post("/v1/completions", json=body)).status_code == 429:
                time.sleep(0.05)  # the other one waits itself, until the first step
            return answer

        http.post("/fault/slow?seconds=0.1")
        asked = [threads.submit(ask) for _ in range(2)]
        reasons = set()
        ends_at = time.monotonic() + 20 * patience
        while not all(one.done() for one in asked) and time.monotonic() < ends_at:
            ready = http.get("/health/ready")
            assert http.get("/health/live").status_code == 200
            if ready.status_code == 503:
                reasons.add(ready.json()["status"])
            time.sleep(0.1)
        http.post("/fault/slow?seconds=0")
        assert [one.result().status_code for one in asked] == [200, 200]
        assert reasons == {f"the queue of {SMOLLM2} is full"}
        assert http.get("/health/ready").status_code == 200


def test_a_broken_model_file_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_text("junk")
    command = [sys.executable, "-m", "kvarn.cli.main", "serve", "--port", "0", "--model", str(tmp_path / "broken.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvarn: ")
    assert "not a GGUF file" in line


@pytest.mark.model
def test_a_port_in_use_is_told_in_one_sentence(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "kvarn.cli.main", "serve", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"kvarn: cannot listen on 127.0.0.1 port {server.port}: Address already in use; choose another --port"
    )
