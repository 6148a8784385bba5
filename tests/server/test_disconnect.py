"""A client that goes away ends its request: in every phase, however it leaves, whether it streams or waits.

All cases run beside one neighbour, whose stream must not notice.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.server.asking import TEXT, text_body
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path
from tests.server.sse import DONE, events

pytestmark = pytest.mark.model

PATIENCE_S = 60.0  # only what hangs gets there
PASS_S = 0.05  # added to every pass, so that phases last long enough to be met
NEIGHBOUR = {"max_tokens": 1900, "ignore_eos": True, "stream": True}
PHASES = ("queued", "prefill", "decode")
FIGURES = ("http_requests", "generations", "running", "waiting", "blocks_used", "tasks", "files")


def _fin(connection: socket.socket) -> None:
    connection.close()


def _rst(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


LEAVING: dict[str, Callable[[socket.socket], None]] = {"fin": _fin, "rst": _rst, "half-close": _half_close}


@dataclass
class Neighbour:
    """A stream that runs beside everything, and what it said."""

    said: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    request_id: str = ""

    def run(self, server: ServerProcess, started: threading.Event) -> None:
        with server.client() as http, http.stream("POST", TEXT, json=text_body(**NEIGHBOUR)) as response:
            self.request_id = response.headers["x-request-id"]
            for event in events(response):
                if event != DONE:
                    self.said.append(event["choices"][0]["text"])
                    self.finish_reason = event["choices"][0]["finish_reason"]
                started.set()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Two requests at a time; the rest waits."""
    config = "heartbeat_timeout_s = 120\n[engine]\nmax_running = 2\nmax_batch_tokens = 64\n"
    options = ("--model", model_path(SMOLLM2), "--context", "2048")
    with ServerProcess(*options, config=config, module="tests.server.faulty") as process:
        yield process
        assert process.process.poll() is None, process.log[-4000:]


@pytest.fixture(scope="module")
def beside_a_neighbour(server: ServerProcess) -> Iterator[httpx.Client]:
    """Run the tests beside a stream; afterwards it must have said what it says alone, and nothing may be left."""
    neighbour, started = Neighbour(), threading.Event()
    with server.client() as http:
        before = state(http)
        http.post(f"/fault/slow?seconds={PASS_S}")
        thread = threading.Thread(target=neighbour.run, args=(server, started))
        thread.start()
        assert started.wait(60)
        yield http
        http.delete(f"/v1/requests/{neighbour.request_id}")
        thread.join(60)
        http.post("/fault/slow?seconds=0")
        assert neighbour.finish_reason == "cancelled"
        until(http, lambda now: now == before, f"everything is as before: {before}")
        num_tokens = len(neighbour.said)
        alone = http.post(TEXT, json=text_body(**NEIGHBOUR | {"stream": False, "max_tokens": num_tokens + 8})).json()
    said = "".join(neighbour.said)
    assert num_tokens > 20
    assert alone["choices"][0]["text"].startswith(said)


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize("phase", PHASES)
def test_leaving_ends_the_request(
    beside_a_neighbour: httpx.Client, server: ServerProcess, patience: float, *, phase: str, leaving: str, streams: bool
) -> None:
    http = beside_a_neighbour
    until(http, lambda now: (now["running"], now["waiting"]) == (1, 0), "only the neighbour runs")
    num_blockers = int(phase == "queued")
    with ExitStack() as open_sockets:
        for _ in range(num_blockers):
            open_sockets.enter_context(sent(server, text_body("Block", max_tokens=1000, ignore_eos=True)))
            until(http, lambda now: now["running"] == 2, "both places are taken")
        prompt = "word " * 1500 if phase == "prefill" else "Hello"
        body = text_body(prompt, max_tokens=500, ignore_eos=True, stream=streams)
        connection = open_sockets.enter_context(sent(server, body))
        until(http, lambda now: now["generations"] == 2 + num_blockers, "the request was accepted")
        _reach(http, phase, connection, streams=streams)
        LEAVING[leaving](connection)
        left_at = time.monotonic()
        until(http, lambda now: now["generations"] == 1 + num_blockers, "the server has noticed")
        until(http, lambda now: now["running"] + now["waiting"] == 1 + num_blockers, "the engine has noticed")
        # One step, and the time that asking for the state takes.
        assert time.monotonic() - left_at < 2.0 * patience


def test_a_client_that_leaves_early_is_counted_by_phase(beside_a_neighbour: httpx.Client) -> None:
    lines = beside_a_neighbour.get("/metrics").text.splitlines()
    counts = {
        line.partition('phase="')[2].partition('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("kvarn_cancelled_total{")
    }
    assert counts == {"queued": 6, "prefill": 6, "decode": 6 + 6}  # the blockers were decoding


def test_a_client_that_leaves_while_a_model_loads_is_gone_and_the_load_goes_on() -> None:
    models = ("--model", model_path(SMOLLM2), "--model", model_path(MINILM))
    with ServerProcess(*models, module="tests.server.faulty") as server, server.client() as http:
        http.post("/fault/slow-load?seconds=4")
        asked_at = time.monotonic()
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/embeddings", json={"model": MINILM, "input": "flour"}, timeout=0.3)
        until(http, lambda now: now["http_requests"] == 0, "the server has noticed")
        assert time.monotonic() - asked_at < 4.0
        loaded = http.post("/v1/embeddings", json={"model": MINILM, "input": "flour"})
        assert loaded.status_code == 200
        assert time.monotonic() - asked_at < 8.0  # the same load, not one more


def _reach(http: httpx.Client, phase: str, connection: socket.socket, *, streams: bool) -> None:
    if phase == "queued":
        until(http, lambda now: now["waiting"] == 1, "the request waits")
        return
    until(http, lambda now: now["running"] == 2, "the request runs")
    if phase == "decode" and streams:
        read = b""
        while b"data: " not in read:
            read += connection.recv(4096)
    elif phase == "decode":
        time.sleep(6 * PASS_S)  # one pass for the prompt, then it decodes


def sent(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request has been sent, and nothing read."""
    content = json.dumps(body).encode()
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(f"{head}\r\n\r\n".encode() + content)
    return connection


def state(http: httpx.Client) -> dict[str, int]:
    figures: dict[str, int] = http.get("/fault/state").json()
    return {name: figures[name] for name in FIGURES}


def until(http: httpx.Client, is_so: Callable[[dict[str, int]], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so(now := state(http)):
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}; now {now}"
        time.sleep(0.02)
