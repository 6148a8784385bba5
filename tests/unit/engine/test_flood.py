"""Low priorities beside high ones, in simulated time: a flood that the others hardly notice, and that ends.

Step times are those of SmolLM2 on two cores; noise and HTTP are left out, see tests/server/test_tiers.py for those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvarn.engine.engine import Engine
from kvarn.request import Request
from kvarn.types import SamplingParams, TokenEvent
from tests.conftest import Size
from tests.submitting import submit
from tests.unit.engine.fake import SimulatedClock, make_engine

NUM_PAID, NUM_FREE_AT_ONCE = 8, 16
PAID, FREE = 20, 0  # priorities of the default tiers


@dataclass(slots=True)
class Times:
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    def p99(self) -> tuple[float, float]:
        return _percentile(self.first, 0.99), _percentile(self.between, 0.99)


class Load:
    """Clients of an engine that send their next request when the last one has ended."""

    def __init__(self, engine: Engine, clock: SimulatedClock) -> None:
        self.engine = engine
        self.clock = clock
        self.paid = Times()
        self.num_free_ended = 0
        self._open: dict[str, tuple[Request, int | None]] = {}  # with the number of a paid client
        self._told_at: dict[str, float] = {}
        self._turns = itertools.count()
        for number in range(NUM_PAID):
            self._send_paid(number)

    def run(self, is_over: Callable[[], bool], max_steps: int = 200_000) -> None:
        for _ in range(max_steps):
            if is_over():
                return
            for event in self.engine.step():
                self.take(event)
        raise AssertionError(f"the flood does not end: {self.num_free_ended} have")

    def take(self, event: TokenEvent) -> None:
        request, number = self._open[event.request_id]
        if number is not None:
            before = self._told_at.get(request.id)
            times = self.paid.first if before is None else self.paid.between
            times.append(self.clock.now - (request.submitted_at if before is None else before))
            self._told_at[request.id] = self.clock.now
        if event.finish_reason is None:
            return
        del self._open[request.id]
        if number is not None:
            self._send_paid(number)
        else:
            self.num_free_ended += 1
            self.send_free(request.num_prompt)

    def flood(self, num_prompt: int) -> None:
        for _ in range(NUM_FREE_AT_ONCE):
            self.send_free(num_prompt)

    def send_free(self, num_prompt: int) -> None:
        self._submit(num_prompt, 12, FREE, None)

    def _send_paid(self, number: int) -> None:
        self._submit(40, 36 + 4 * (number + next(self._turns)) % 32, PAID, number)

    def _submit(self, num_prompt: int, num_tokens: int, priority: int, number: int | None) -> None:
        turn = next(self._turns)
        prompt = [1 + turn % 250, 1 + turn // 250 % 250, *([7] * (num_prompt - 2))]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, priority=priority)
        request = submit(self.engine, prompt, params)
        self._open[request.id] = request, number


def machine(step_s: float = 0.015, row_s: float = 0.0018) -> Load:
    clock = SimulatedClock(step_s, row_s)
    options = {"num_blocks": 2000, "context": 500, "max_batch_tokens": 512, "policy": "priority"}
    return Load(make_engine(lambda _: 7, clock=clock, **options), clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_prompt", [10, 60])
def test_a_flood_of_low_priorities_moves_p99_of_the_others_by_at_most_a_fifth(num_prompt: int, size: Size) -> None:
    load, num_samples = machine(), size(150, 1500)
    load.run(lambda: len(load.paid.first) >= 30)
    load.paid = quiet = Times()
    load.run(lambda: len(load.paid.first) >= num_samples)
    load.paid = busy = Times()
    load.flood(num_prompt)
    # Small free prompts end soon: more of them, so that enough paid answers begin meanwhile to speak of a p99.
    load.run(lambda: load.num_free_ended >= 32 and len(load.paid.first) >= num_samples)
    for before, after in zip(quiet.p99(), busy.p99(), strict=True):
        assert after <= 1.2 * before


def test_the_flood_gets_its_share_and_ends() -> None:
    load = machine()
    load.run(lambda: len(load.paid.first) >= 20)
    load.flood(40)
    began = load.clock.now
    load.run(lambda: load.num_free_ended >= 32)
    # 32 prompts of 40 rows and 384 tokens take 3 s by themselves: within an eighth of the time they are done in 24 s.
    assert load.clock.now - began < 40


def test_a_slow_machine_does_not_starve_the_flood() -> None:
    load = machine(step_s=0.050, row_s=0.006)  # prefill_ms leaves prompts little room beside such steps
    load.run(lambda: len(load.paid.first) >= 20)
    load.flood(10)
    began = load.clock.now
    load.run(lambda: load.num_free_ended >= 32)
    assert load.clock.now - began < 4 * 40


def test_a_chunk_in_the_slow_lane_that_sits_out_holds_nobody_back() -> None:
    """Found here: the lane held a low prompt while a high one waited for it to give way, and nothing moved."""
    load = machine()
    load.run(lambda: len(load.paid.first) >= 20)
    load.flood(100)
    for _ in range(400):
        before = load.clock.now
        for event in load.engine.step():
            load.take(event)
        assert load.clock.now > before


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
