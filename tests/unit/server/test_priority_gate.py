"""Requests of lower tiers are admitted one by one while those of higher tiers run."""

from __future__ import annotations

import asyncio

import pytest

from kvarn.server.access.keys import Principal
from kvarn.server.access.priority_gate import MAX_WAIT_S, SPACING_S, PriorityGate
from kvarn.server.access.tiers import DEFAULT_TIERS

FREE, PAID, TOP = (DEFAULT_TIERS[name].priority for name in ("free", "pro", "enterprise"))


class Application:
    """Answers when it is told to, and remembers which tiers were admitted."""

    def __init__(self, gate: PriorityGate) -> None:
        self.gate = gate
        self.admitted: list[str] = []
        self.may_end = asyncio.Event()

    async def serve(self, tier: str | None, method: str) -> None:
        principal = None if tier is None else Principal("key", DEFAULT_TIERS[tier], "tenant")
        async with self.gate.admitted(principal, method):
            self.admitted.append("nobody" if tier is None else tier)
            await self.may_end.wait()


def ask(application: Application, tier: str | None, method: str = "POST") -> asyncio.Task[None]:
    return asyncio.create_task(application.serve(tier, method))


def test_lower_tiers_are_admitted_one_by_one_beside_higher_ones() -> None:
    async def run() -> None:
        gate = PriorityGate()
        application = Application(gate)
        tasks = [ask(application, tier) for tier in ("free", "free", "pro")]
        await asyncio.sleep(0)
        assert application.admitted == ["free", "free", "pro"]  # none of a higher tier ran when the first two came
        tasks += [ask(application, tier) for tier in ("free", "free", "free", "pro", None)]
        await asyncio.sleep(0)
        assert application.admitted[3:] == ["free", "pro", "nobody"]
        await asyncio.sleep(4 * SPACING_S)
        assert application.admitted[6:] == ["free", "free"]
        tasks.append(ask(application, "free", "DELETE"))
        await asyncio.sleep(0)
        assert application.admitted[8:] == ["free"]  # a request is cancelled at once
        application.may_end.set()
        await asyncio.gather(*tasks)
        assert gate.wait_s(FREE) == 0.0

    asyncio.run(run())


def test_nobody_waits_long_however_many_come() -> None:
    now = 100.0
    gate = PriorityGate(clock=lambda: now)
    gate._num_running[PAID] = 1
    waits = [gate.wait_s(FREE) for _ in range(1_000)]
    assert waits[:3] == pytest.approx([0.0, SPACING_S, 2 * SPACING_S])
    assert max(waits) == pytest.approx(MAX_WAIT_S)
    now += MAX_WAIT_S + 2 * SPACING_S
    assert gate.wait_s(FREE) == 0.0


def test_equals_do_not_wait_for_each_other() -> None:
    gate = PriorityGate()
    gate._num_running[PAID] = 8
    assert [gate.wait_s(PAID) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_a_tier_waits_for_its_own_requests_only() -> None:
    gate = PriorityGate(clock=lambda: 100.0)
    gate._num_running[TOP] = 1
    assert [gate.wait_s(FREE) for _ in range(50)][-1] > 0.5
    assert gate.wait_s(PAID) == 0.0
