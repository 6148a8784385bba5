"""Attacks that once froze the server: others are served beside each of them as before (hardening A)."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import Record, Size
from tests.server.edge_client import HEALTH, Client
from tests.server.keyed import KeyedServer, chat_body, running
from tests.server.process import MINILM, ROOT
from tests.server.test_storage_limits import cpu_s
from tests.server.watching import Seen, Watch, watching

pytestmark = pytest.mark.model

MAX_PROBE_S = 0.2
MAX_GAP_RATIO = 3.0
MAX_COST_RATIO = 4.0
ATTACKER = "frugal"  # the tokens a minute that free keys have by default, and more requests


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    with running(tmp_path_factory.mktemp("attacked"), settings="max_connections = 4096\n") as server:
        with server.client("fred") as client:
            assert client.post("/v1/collections", json={"name": "words"}).status_code == 200
            loaded = client.post("/v1/embeddings", json={"model": MINILM, "input": "loads the model"})
            assert loaded.status_code == 200
        yield server


@pytest.fixture(scope="module")
def watch(attacked: KeyedServer) -> Iterator[Watch]:
    with watching(attacked) as one:
        one.during(2.0)
        yield one


def chat(content: str) -> bytes:
    return f'{{"model":"smollm2","messages":[{{"role":"user","content":{content}}}]'.encode()


def of_many(one: str, number: int) -> str:
    return ",".join(one.replace("#", str(at)) for at in range(number))


# Bodies of about a megabyte, and as many values as are just allowed.
BODIES: dict[str, Callable[[int], tuple[str, bytes]]] = {
    "wrong parts": lambda number: ("/v1/chat/completions", chat(f"[{of_many('1', number)}]") + b"}"),
    "unknown fields": lambda number: ("/v1/chat/completions", b"{" + of_many('"f#":1', number).encode() + b"}"),
    "template arguments": lambda number: (
        "/v1/chat/completions",
        chat('"hi"') + b',"chat_template_kwargs":{' + of_many('"k#":1', number).encode() + b"}}",
    ),
    "a schema of allowed size": lambda number: (
        "/v1/messages",
        json.dumps(
            {
                "model": "smollm2",
                "max_tokens": 4,
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [{"name": "f", "input_schema": {"type": "object", "enum": ["x"] * min(number, 60_000)}}],
            }
        ).encode(),
    ),
    "token ids": lambda number: (
        "/v1/embeddings",
        f'{{"model":"{MINILM}","input":[{of_many("1", number)}]}}'.encode(),
    ),
    "words without end": lambda number: (
        "/v1/collections/words/documents",
        json.dumps({"documents": [{"text": "x" * number * 17}]}).encode(),
    ),
    "texts without end": lambda number: (
        "/v1/embeddings",
        json.dumps({"model": MINILM, "input": "x" * number * 16}).encode(),
    ),
}


@contextmanager
def attackers(keyed: KeyedServer, path: str, body: bytes) -> Iterator[list[int]]:
    """Free clients that send a body again and again; the statuses they got are in the list at the end."""
    command = [sys.executable, "-m", "tests.server.attacking", str(keyed.process.port), keyed.keys[ATTACKER], path]
    statuses: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        process.stdin.write(body)
        process.stdin.close()
        process.stdin = None
        try:
            yield statuses
        finally:
            process.send_signal(signal.SIGTERM)
            statuses += json.loads(process.communicate(timeout=60)[0])


def check(quiet: Seen, busy: Seen, patience: float) -> None:
    assert not busy.failures
    calm, seen = quiet.figures(), busy.figures()
    assert seen["probe_p99_s"] <= MAX_PROBE_S * patience, seen
    assert seen["gap_p99_s"] <= MAX_GAP_RATIO * calm["gap_p99_s"] * patience, (calm, seen)


@pytest.mark.long
@pytest.mark.parametrize("name", list(BODIES))
def test_others_are_served_beside_hostile_bodies(
    watch: Watch, name: str, size: Size, patience: float, record: Record
) -> None:
    attacked, seconds = watch.keyed, float(size(2, 8))
    path, body = BODIES[name](size(60_000, 480_000))
    quiet = watch.during(seconds)
    before = peak_bytes(attacked)
    with attackers(attacked, path, body) as statuses:
        busy = watch.during(seconds)
    figures = {"quiet": quiet.figures(), "attacked": busy.figures(), "num_bytes": len(body)}
    growth = {"growth_bytes": peak_bytes(attacked) - before, "statuses": sorted(set(statuses)), "num": len(statuses)}
    record(f"flood-{name.replace(' ', '-')}", figures | growth)
    check(quiet, busy, patience)


def test_others_are_served_beside_idle_connections(watch: Watch, size: Size, patience: float, record: Record) -> None:
    """More keep-alive connections of one host, without a key, than the server has."""
    attacked, seconds, number = watch.keyed, float(size(2, 10)), size(1500, 4100)
    quiet = watch.during(seconds)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, number + 500)), hard))
    clients: list[Client] = []
    try:
        began = time.monotonic()
        for _ in range(number):
            clients.append(Client(attacked.process.port))
            clients[-1].send(HEALTH)
        assert sum(client.reply().status == 200 for client in clients[-100:]) == 100
        opened_s = time.monotonic() - began
        busy = watch.during(seconds)
        num_open = sum(is_open(client.socket) for client in clients)
    finally:
        for client in clients:
            client.socket.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    figures = {"quiet": quiet.figures(), "attacked": busy.figures(), "opened_s": opened_s, "num_connections": number}
    record("flood-connections", figures | {"num_left_open": num_open})
    check(quiet, busy, patience)
    assert num_open <= 1024  # a quarter of max_connections


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        while data := one.recv(1 << 16):
            assert data
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def peak_bytes(keyed: KeyedServer) -> int:
    """The most memory that the process has ever had."""
    for line in Path(f"/proc/{keyed.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


@pytest.mark.parametrize("name", list(BODIES))
def test_a_hostile_body_costs_the_server_hardly_more_than_a_plain_one(attacked: KeyedServer, name: str) -> None:
    """In CPU time, which does not depend on who else uses the machine; the times themselves are in the long form."""
    path, body = BODIES[name](60_000)
    plain = json.dumps(chat_body("x " * (len(body) // 2))).encode()  # refused: beyond the context
    costs = [cost_s(attacked, *asked) for asked in (("/v1/chat/completions", plain), (path, body))]
    assert costs[1] < MAX_COST_RATIO * costs[0] + 0.05, costs


def cost_s(keyed: KeyedServer, path: str, body: bytes) -> float:
    """CPU time of the server for a request: the least of three."""
    costs = []
    with keyed.client(ATTACKER) as client:
        for _ in range(3):
            began = cpu_s(keyed.process)
            client.post(path, content=body, headers={"content-type": "application/json"})
            costs.append(cpu_s(keyed.process) - began)
    return min(costs)
