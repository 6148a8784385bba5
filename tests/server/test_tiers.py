"""F7: a flood of free clients beside paid streams. Paid ones hardly notice, and every free request still ends.

The clients speak HTTP by hand: they share the cores with the server, so they must cost little.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.conftest import Record, Size
from tests.server.keyed import KeyedServer, completion_body

pytestmark = pytest.mark.model

NUM_PAID = 8
NUM_FREE = 64
MAX_MOVE = 0.20  # of p99, promised by the long form


@dataclass(slots=True)
class Times:
    """Seconds to first tokens and between tokens, as clients saw them."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    def p99(self) -> tuple[float, float]:
        return _percentile(self.first, 0.99), _percentile(self.between, 0.99)


@dataclass(slots=True)
class Flood:
    """What became of the free clients."""

    num_finished: int = 0
    num_refused: int = 0
    failures: list[str] = field(default_factory=list)


async def stream(port: int, key: str, body: Mapping[str, object], times: Times) -> tuple[int, float]:
    """One streamed request on its own connection: status and, for a 429, when to come again."""
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        began = last = time.perf_counter()
        writer.write(head.encode() + payload)
        status = int((await reader.readline()).split()[1])
        retry_after_s, is_done, is_first = 0.0, False, True
        while line := await reader.readline():
            if line.startswith(b"retry-after:"):
                retry_after_s = float(line.split()[1])
            elif line.startswith(b"data: [DONE]"):
                is_done = True
            elif line.startswith(b"data: {"):
                now = time.perf_counter()
                (times.first if is_first else times.between).append(now - (began if is_first else last))
                is_first, last = False, now
        return (status if is_done or status != 200 else 0), retry_after_s
    finally:
        writer.close()


async def paid_client(keyed: KeyedServer, number: int, times: Times, until: asyncio.Event) -> None:
    turn = 0
    while not until.is_set():
        turn += 1
        # Lengths of their own: answers that all ended in one step would never meet another's prompt.
        num_tokens = 36 + 4 * (number + turn) % 32
        body = completion_body(f"Paid {number} {turn}: " + "once upon a time " * 6, max_tokens=num_tokens, **STREAMED)
        status, _ = await stream(keyed.process.port, keyed.keys["alice"], body, times)
        assert status == 200


async def free_client(keyed: KeyedServer, number: int, num_requests: int, flood: Flood) -> None:
    for turn in range(num_requests):
        body = completion_body(f"Free {number} {turn}: " + "the quick brown fox", max_tokens=12, **STREAMED)
        while True:
            status, retry_after_s = await stream(keyed.process.port, keyed.keys["fred"], body, Times())
            if status != 429:
                break
            flood.num_refused += 1
            assert retry_after_s >= 1
            await asyncio.sleep(retry_after_s)
        if status == 200:
            flood.num_finished += 1
        else:
            flood.failures.append(f"client {number}: {status}")


async def measure(keyed: KeyedServer, quiet_s: float, num_requests: int) -> tuple[Times, Times, Flood, float]:
    """Paid streams alone, with the flood beside them, and alone again: so that a machine that drifts does not count."""
    await paid_for(keyed, 2.0, Times())  # warm
    quiet, busy, flood = Times(), Times(), Flood()
    await paid_for(keyed, quiet_s / 2, quiet)
    until, began = asyncio.Event(), time.monotonic()
    paid = [asyncio.create_task(paid_client(keyed, number, busy, until)) for number in range(NUM_PAID)]
    await asyncio.gather(*(free_client(keyed, number, num_requests, flood) for number in range(NUM_FREE)))
    took_s = time.monotonic() - began
    until.set()
    await asyncio.gather(*paid)
    await paid_for(keyed, quiet_s / 2, quiet)
    return quiet, busy, flood, took_s


async def paid_for(keyed: KeyedServer, seconds: float, times: Times) -> None:
    until = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, until.set)
    await asyncio.gather(*(paid_client(keyed, number, times, until) for number in range(NUM_PAID)))


STREAMED = {"stream": True, "ignore_eos": True}


def test_a_flood_of_free_clients_hardly_moves_paid_streams(
    keyed: KeyedServer, size: Size, patience: float, record: Record
) -> None:
    quiet, busy, flood, took_s = asyncio.run(measure(keyed, quiet_s=size(4, 40), num_requests=size(1, 3)))
    (quiet_first, quiet_between), (busy_first, busy_between) = quiet.p99(), busy.p99()
    moves = {"first_token": busy_first / quiet_first - 1, "inter_token": busy_between / quiet_between - 1}
    figures = {
        "paid_streams": NUM_PAID,
        "free_clients": NUM_FREE,
        "quiet_p99_ms": {"first_token": 1000 * quiet_first, "inter_token": 1000 * quiet_between},
        "busy_p99_ms": {"first_token": 1000 * busy_first, "inter_token": 1000 * busy_between},
        "quiet_p50_ms": {name: 1000 * _percentile(getattr(quiet, name), 0.5) for name in ("first", "between")},
        "busy_p50_ms": {name: 1000 * _percentile(getattr(busy, name), 0.5) for name in ("first", "between")},
        "moves": moves,
        "free_finished": flood.num_finished,
        "free_refused": flood.num_refused,
        "flood_s": took_s,
        "samples": [len(quiet.first), len(quiet.between), len(busy.first), len(busy.between)],
    }
    print(json.dumps(figures, indent=1))
    record("tiers", figures)
    assert not flood.failures
    assert flood.num_finished == NUM_FREE * size(1, 3)
    assert flood.num_refused > 0  # the limit was met, or this was no flood
    limit = MAX_MOVE if patience == 1 else patience
    assert all(move <= limit for move in moves.values()), moves


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
