"""F7: a flood of free clients beside paid streams. Paid ones hardly notice, and every free request still ends.

The clients speak HTTP by hand: they share the cores with the server, so they must cost little.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import Record, Size
from tests.server.keyed import KeyedServer, completion_body

pytestmark = pytest.mark.model

NUM_PAID = 8
NUM_FREE = 64
MAX_MOVE = 0.20  # of p99, promised by the long form
MAX_STOLEN = 0.02  # of a phase that counts
WARM_S = 3.0  # until answers that began together no longer end together


@dataclass(slots=True)
class Times:
    """Seconds to first tokens and between tokens, as clients saw them."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    def at(self, share: float) -> dict[str, float]:
        """A percentile of both."""
        return {"first_token": _percentile(self.first, share), "inter_token": _percentile(self.between, share)}


@dataclass(slots=True)
class Flood:
    """What became of the free clients."""

    num_finished: int = 0
    num_refused: int = 0
    took_s: float = 0.0
    failures: list[str] = field(default_factory=list)


async def stream(
    port: int, key: str, body: Mapping[str, object], times: Callable[[], Times] = Times
) -> tuple[int, float]:
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
                (times().first if is_first else times().between).append(now - (began if is_first else last))
                is_first, last = False, now
        return (status if is_done or status != 200 else 0), retry_after_s
    finally:
        writer.close()


class PaidStreams:
    """Paid clients without a pause, through quiet and busy times: each time goes to whoever keeps them then."""

    def __init__(self, keyed: KeyedServer) -> None:
        self.times = Times()
        self._keyed = keyed
        self._is_over = False

    async def run(self, number: int) -> None:
        # Streams that kept step with each other would meet in the same pattern for a whole phase.
        lengths = random.Random(number)
        for turn in itertools.count():
            num_tokens = lengths.randint(36, 64)
            prompt = f"Paid {number} {turn}: " + "once upon a time " * 6
            body = completion_body(prompt, max_tokens=num_tokens, **STREAMED)
            status, _ = await stream(self._keyed.process.port, self._keyed.keys["alice"], body, self.current)
            assert status == 200
            if self._is_over:
                return

    def current(self) -> Times:
        return self.times

    def end(self) -> None:
        self._is_over = True


async def free_client(keyed: KeyedServer, number: int, num_requests: int, flood: Flood) -> None:
    for turn in range(num_requests):
        body = completion_body(f"Free {number} {turn}: " + "the quick brown fox", max_tokens=12, **STREAMED)
        while True:
            status, retry_after_s = await stream(keyed.process.port, keyed.keys["fred"], body)
            if status != 429:
                break
            flood.num_refused += 1
            assert retry_after_s >= 1
            await asyncio.sleep(retry_after_s)
        if status == 200:
            flood.num_finished += 1
        else:
            flood.failures.append(f"client {number}: {status}")


@dataclass(slots=True)
class Phase:
    """A stretch of time with or without the flood, and how much of the processors others on the host took then."""

    is_busy: bool
    times: Times = field(default_factory=Times)
    stolen: float = 0.0


async def measure(keyed: KeyedServer, quiet_s: float, num_floods: int, num_requests: int) -> tuple[list[Phase], Flood]:
    """Paid streams through quiet and busy times by turns: a machine that drifts does not count.

    A flood: every free client's num_requests.
    """
    phases, flood, paid = [Phase(number % 2 == 1) for number in range(2 * num_floods + 1)], Flood(), PaidStreams(keyed)
    tasks = [asyncio.create_task(paid.run(number)) for number in range(NUM_PAID)]
    await asyncio.sleep(WARM_S)
    for phase in phases:
        paid.times, stolen, began = phase.times, StolenTime(), time.monotonic()
        if phase.is_busy:
            await asyncio.gather(*(free_client(keyed, number, num_requests, flood) for number in range(NUM_FREE)))
            flood.took_s += time.monotonic() - began
        else:
            await asyncio.sleep(quiet_s / (num_floods + 1))
        phase.stolen = stolen.share()
    paid.times = Times()  # their last answers end one by one
    paid.end()
    await asyncio.gather(*tasks)
    return phases, flood


def pooled(phases: list[Phase], *, is_busy: bool) -> Times:
    """The times of all such phases, without those the host disturbed if others are left."""
    alike = [phase for phase in phases if phase.is_busy == is_busy]
    calm = [phase.times for phase in alike if phase.stolen <= MAX_STOLEN] or [phase.times for phase in alike]
    return Times([one for times in calm for one in times.first], [one for times in calm for one in times.between])


class StolenTime:
    """What the host took from this machine since the object was made; it says which runs mean little."""

    def __init__(self) -> None:
        self._began = _ticks()

    def share(self) -> float:
        total, stolen = (now - then for now, then in zip(_ticks(), self._began, strict=True))
        return stolen / max(total, 1)


def _ticks() -> tuple[int, int]:
    """All of the processors' time, and what was stolen of it."""
    values = [int(value) for value in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return sum(values), values[7]


STREAMED = {"stream": True, "ignore_eos": True}


def test_a_flood_of_free_clients_hardly_moves_paid_streams(
    keyed: KeyedServer, size: Size, patience: float, record: Record
) -> None:
    num_floods, num_requests = size(1, 5), size(1, 4)
    phases, flood = asyncio.run(measure(keyed, size(4, 160), num_floods, num_requests))
    quiet, busy = pooled(phases, is_busy=False), pooled(phases, is_busy=True)
    figures = {
        "paid_streams": NUM_PAID,
        "free_clients": NUM_FREE,
        "quiet_p99_ms": milliseconds(quiet, 0.99),
        "busy_p99_ms": milliseconds(busy, 0.99),
        "quiet_p50_ms": milliseconds(quiet, 0.5),
        "busy_p50_ms": milliseconds(busy, 0.5),
        "moves": moves(quiet, busy, 0.99),
        "free_finished": flood.num_finished,
        "free_refused": flood.num_refused,
        "flood_s": flood.took_s,
        "stolen": [phase.stolen for phase in phases],  # quiet, busy, quiet, ...
        "samples": [len(quiet.first), len(quiet.between), len(busy.first), len(busy.between)],
    }
    print(json.dumps(figures, indent=1))
    record("tiers", figures)
    assert not flood.failures
    assert flood.num_finished == NUM_FREE * num_floods * num_requests
    assert flood.num_refused > 0  # the limit was met, or this was no flood
    if patience == 1:
        assert max(moves(quiet, busy, 0.99).values()) <= MAX_MOVE
    else:  # some 20 first tokens in the quiet phases: their p99 would be one of them
        assert max(moves(quiet, busy, 0.5).values()) <= patience


def milliseconds(times: Times, share: float) -> dict[str, float]:
    return {name: 1000 * seconds for name, seconds in times.at(share).items()}


def moves(quiet: Times, busy: Times, share: float) -> dict[str, float]:
    """By how much of the quiet time a percentile is later beside a flood."""
    return {name: seconds / quiet.at(share)[name] - 1 for name, seconds in busy.at(share).items()}


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
