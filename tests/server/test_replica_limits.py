"""Real servers that count limits in one Redis, under faults: every request is accounted for, in any history."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvarn.server.access.keyfile import draw_key, write_keys
from tests.chat_model import write_chat_model
from tests.conftest import Record, Size
from tests.redis_server import RedisServer, require_redis
from tests.server.process import ServerProcess

MAX_TOKENS = 8
TOKENS_PER_MIN = 10**6
REQUESTS_PER_MIN = 400
CONFIG = f"""
[tiers.team]
requests_per_min = {REQUESTS_PER_MIN}
tokens_per_min = {TOKENS_PER_MIN}
concurrency = 32
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as its client saw it; status 0: the connection ended without an answer."""

    replica: int
    began: float
    took_s: float
    status: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas of one model, their Redis, and a key of tier team."""

    servers: list[ServerProcess]
    redis: RedisServer
    key: str

    def client(self, index: int) -> httpx.Client:
        return self.servers[index].client(headers={"authorization": f"Bearer {self.key}"})

    def metric(self, index: int, name: str) -> float:
        with self.servers[index].client() as http:
            lines = http.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))

    def wait_until_together(self, indices: list[int]) -> None:
        """Until these, and no others, count in Redis."""
        deadline = time.monotonic() + 30
        while [
            (self.metric(one, "kvarn_limits_away"), self.metric(one, "kvarn_limits_replicas")) for one in indices
        ] != [(0, len(indices))] * len(indices):
            assert time.monotonic() < deadline, "the replicas did not come together"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Fleet]:
    require_redis()
    num_servers = 3 if pytestconfig.getoption("--long") else 2
    folder: Path = tmp_path_factory.mktemp("fleet")
    key, entry = draw_key("team", "team")
    write_keys(folder / "keys.toml", [entry])
    model = write_chat_model(folder / "tiny.gguf")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        with ThreadPoolExecutor(num_servers) as threads:
            starting = [
                threads.submit(
                    ServerProcess(
                        "--model", model, "--limits", redis.url, config=CONFIG, keys=folder / "keys.toml"
                    ).__enter__
                )
                for _ in range(num_servers)
            ]
            servers = [stack.push(one.result()) for one in starting]
        fleet = Fleet(servers, redis, key)
        fleet.wait_until_together(list(range(num_servers)))
        yield fleet


def ask(http: httpx.Client, replica: int, prompt: str) -> Asked:
    body = {"model": "tiny.gguf", "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    began = time.monotonic()
    try:
        answer = http.post("/v1/completions", json=body)
    except httpx.HTTPError:
        return Asked(replica, began, time.monotonic() - began, 0, 0)
    took_s = time.monotonic() - began
    num_tokens = answer.json()["usage"]["total_tokens"] if answer.status_code == 200 else 0
    return Asked(replica, began, took_s, answer.status_code, num_tokens)


def load(fleet: Fleet, replica: int, seed: int, over: threading.Event, pause_s: float) -> list[Asked]:
    """One client of one replica, one request after the other."""
    dice, history = random.Random(seed), []
    with fleet.client(replica) as http:
        while not over.is_set():
            history.append(ask(http, replica, "a b c " * dice.randint(1, 4)))
            if history[-1].status == 0:
                break
            time.sleep(dice.random() * pause_s)
    return history


def freeze(fleet: Fleet) -> None:
    fleet.redis.freeze()
    time.sleep(1.5)
    fleet.redis.thaw()


def restart(fleet: Fleet) -> None:
    fleet.redis.kill()
    time.sleep(0.5)
    fleet.redis.start()


def empty(fleet: Fleet) -> None:
    fleet.redis.command("FLUSHALL")


def kill_a_replica(fleet: Fleet) -> None:
    fleet.servers[-1].process.send_signal(signal.SIGKILL)


FAULTS: list[Callable[[Fleet], None]] = [freeze, restart, empty, freeze, empty, restart]


def test_every_request_of_all_replicas_is_accounted_for_whatever_fails(
    fleet: Fleet, size: Size, record: Record
) -> None:
    over, num_servers = threading.Event(), len(fleet.servers)
    num_faults, between_s = size(1, 6), size(3.0, 4.5)
    with ThreadPoolExecutor(6) as threads:
        loads = [threads.submit(load, fleet, number % num_servers, number, over, 0.4) for number in range(6)]
        for fault in [*FAULTS[:num_faults], kill_a_replica]:
            time.sleep(between_s)
            fault(fleet)
        time.sleep(size(1.0, between_s))
        over.set()
        history = [one for client in loads for one in client.result()]
    alive = list(range(num_servers - 1))
    fleet.wait_until_together(alive)
    history += fill(fleet, alive)
    charged = TOKENS_PER_MIN - left(fleet, alive)
    answered = [one for one in history if one.status == 200]
    lost = [one for one in history if one.status == 0]
    span_s = max(one.began + one.took_s for one in history) - min(one.began for one in history)
    used = sum(one.num_tokens for one in answered)
    figures = {"requests": len(history), "answered": len(answered), "lost": len(lost), "used": used, "charged": charged}
    record("limits-history", figures | {"limit": REQUESTS_PER_MIN, "span_s": span_s})
    assert span_s < 58  # all of it is in one minute
    assert {one.status for one in history} <= {0, 200, 429}
    assert {one.replica for one in lost} <= {num_servers - 1}
    assert len(lost) <= 6 // num_servers + 1  # requests of the killed replica's clients
    assert len(answered) <= REQUESTS_PER_MIN <= len(answered) + len(lost)
    assert used <= charged <= used + len(lost) * (MAX_TOKENS + 40)


def fill(fleet: Fleet, alive: list[int]) -> list[Asked]:
    """Ask each until it refuses."""
    history = []
    for index in alive:
        with fleet.client(index) as http:
            while not history or history[-1].status == 200 or history[-1].replica != index:
                history.append(ask(http, index, "a"))
    return history


def left(fleet: Fleet, alive: list[int]) -> int:
    """Tokens that are left to the key, by all replicas, which must agree."""
    told = set()
    for index in alive:
        with fleet.client(index) as http:
            answer = http.post("/v1/completions", json={"model": "tiny.gguf", "prompt": "a", "max_tokens": 1})
            assert answer.status_code == 429, answer.text
            told.add(int(answer.headers["x-ratelimit-remaining-tokens"]))
    assert len(told) == 1
    return told.pop()
