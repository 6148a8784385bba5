"""Requests of lower tiers come in one by one while those of higher tiers run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvarn.server.access.keys import Principal
from kvarn.server.access.priority_gate import MAX_WAIT_S, SPACING_S, PriorityGate
from kvarn.server.access.tiers import DEFAULT_TIERS

FREE, PAID, TOP = (DEFAULT_TIERS[name].priority for name in ("free", "pro", "enterprise"))


class Application:
    """Answers when it is told to, and remembers who came in."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Any, _receive: Any, _send: Any) -> None:
        principal = scope.get("kvarn.principal")
        self.came.append("nobody" if principal is None else principal.tier.name)
        await self.may_end.wait()


def ask(entrance: PriorityGate, tier: str | None, method: str = "POST") -> asyncio.Task[None]:
    principal = None if tier is None else Principal("key", DEFAULT_TIERS[tier], "tenant")
    scope = {"type": "http", "method": method, "kvarn.principal": principal}
    return asyncio.create_task(entrance(scope, _unused, _unused))  # type: ignore[arg-type]


async def _unused(*_: object) -> None:
    raise AssertionError("the entrance neither reads nor writes")


def test_lower_tiers_come_in_one_by_one_beside_higher_ones() -> None:
    async def run() -> None:
        application = Application()
        entrance = PriorityGate(application)
        tasks = [ask(entrance, tier) for tier in ("free", "free", "pro")]
        await asyncio.sleep(0)
        assert application.came == ["free", "free", "pro"]  # nobody higher was there when the first two came
        tasks += [ask(entrance, tier) for tier in ("free", "free", "free", "pro", None)]
        await asyncio.sleep(0)
        assert application.came[3:] == ["free", "pro", "nobody"]
        await asyncio.sleep(4 * SPACING_S)
        assert application.came[6:] == ["free", "free"]
        tasks.append(ask(entrance, "free", "DELETE"))
        await asyncio.sleep(0)
        assert application.came[8:] == ["free"]  # a request is cancelled at once
        application.may_end.set()
        await asyncio.gather(*tasks)
        assert entrance.wait_s(FREE) == 0.0

    asyncio.run(run())


def test_nobody_waits_long_however_many_come() -> None:
    now = 100.0
    entrance = PriorityGate(_unused, clock=lambda: now)
    entrance._num_inside[PAID] = 1
    waits = [entrance.wait_s(FREE) for _ in range(1_000)]
    assert waits[:3] == pytest.approx([0.0, SPACING_S, 2 * SPACING_S])
    assert max(waits) == pytest.approx(MAX_WAIT_S)
    now += MAX_WAIT_S + 2 * SPACING_S
    assert entrance.wait_s(FREE) == 0.0


def test_equals_do_not_wait_for_each_other() -> None:
    entrance = PriorityGate(_unused)
    entrance._num_inside[PAID] = 8
    assert [entrance.wait_s(PAID) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_a_tier_waits_for_its_own_requests_only() -> None:
    entrance = PriorityGate(_unused, clock=lambda: 100.0)
    entrance._num_inside[TOP] = 1
    assert [entrance.wait_s(FREE) for _ in range(50)][-1] > 0.5
    assert entrance.wait_s(PAID) == 0.0
