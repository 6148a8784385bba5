"""Rows go to the highest priority first, whether it runs or waits; time is simulated, as SmolLM2 takes on two cores."""

from __future__ import annotations

import itertools

import pytest

from kvarn.config import POLICIES
from kvarn.engine.engine import Engine
from kvarn.request import Request, RequestState
from kvarn.types import SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import SimulatedClock, make_engine

FREE, PRO, ENTERPRISE = 0, 20, 40  # priorities of the default tiers
_numbers = itertools.count()


def machine(policy: str = "priority", **options: object) -> tuple[Engine, SimulatedClock]:
    clock = SimulatedClock(step_s=0.015, row_s=0.0018)
    settings: dict[str, object] = {"num_blocks": 6000, "context": 600, "max_batch_tokens": 512} | options
    return make_engine(lambda _: 7, clock=clock, policy=policy, **settings), clock  # type: ignore[arg-type]


def ask(engine: Engine, num_prompt: int, priority: int, num_tokens: int = 8) -> Request:
    """A request that shares no prefix with any other."""
    number = next(_numbers)
    prompt = [1 + number % 250, 1 + number // 250 % 250, *([7] * (num_prompt - 2))]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, priority=priority)
    return submit(engine, prompt, params)


def run_until_first_token(engine: Engine, request: Request) -> None:
    for _ in range(10_000):
        if request.num_output or request.is_ended:
            return
        engine.step()
    raise AssertionError("it never gets a token")


def sequential_first_tokens(engine: Engine, clock: SimulatedClock, number: int) -> list[float]:
    """Seconds to the first token of one request after another; each arrives as a step has just begun."""
    times = []
    for _ in range(number):
        before = clock.now
        engine.step()
        in_flight_s = clock.now - before
        request = ask(engine, 60, ENTERPRISE)
        run_until_first_token(engine, request)
        assert request.first_token_at is not None
        times.append(in_flight_s + request.first_token_at - request.submitted_at)
        while not request.is_ended:
            engine.step()
    return sorted(times)


def test_thirty_long_prompts_of_a_lower_tier_hardly_delay_one_request_after_another() -> None:
    quiet, beside = (sequential_first_tokens(*_beside(number), 40) for number in (0, 30))
    assert beside[-1] <= 2 * quiet[-1]  # one of them waited 27 s when low prompts were started without rows
    assert beside[int(0.95 * 40)] <= 2 * quiet[int(0.95 * 40)]


def _beside(number: int) -> tuple[Engine, SimulatedClock]:
    engine, clock = machine()
    for _ in range(number):
        ask(engine, 400, PRO, num_tokens=16)
    first = ask(engine, 60, ENTERPRISE)  # from now on the tier is known
    run_until_first_token(engine, first)
    return engine, clock


def test_prompts_that_would_get_no_rows_keep_waiting() -> None:
    engine, _ = machine()
    high = ask(engine, 60, ENTERPRISE, num_tokens=400)
    run_until_first_token(engine, high)
    low = [ask(engine, 400, PRO) for _ in range(30)]
    for _ in range(5):
        engine.step()
    assert sum(request.state is RequestState.RUNNING for request in low) <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_in_the_queue_gets_its_rows_before_lower_prompts_that_run(policy: str) -> None:
    engine, _ = machine(policy, max_batch_tokens=64)
    low = [ask(engine, 400, PRO)]
    engine.step()
    computed = [request.num_computed for request in low]
    high = ask(engine, 120, ENTERPRISE)
    engine.step()
    assert high.num_computed == 64
    assert [request.num_computed for request in low] == computed


def test_of_two_lower_tiers_the_higher_gets_the_share_first() -> None:
    engine, _ = machine(background_share=0.3)
    ask(engine, 60, ENTERPRISE, num_tokens=500)
    free = [ask(engine, 400, FREE) for _ in range(5)]
    while not any(request.num_computed for request in free):
        engine.step()
    computed = sum(request.num_computed for request in free)
    pro = ask(engine, 400, PRO)
    run_until_first_token(engine, pro)
    # Only what the step with its last rows had left.
    assert sum(request.num_computed for request in free) - computed < 20


def test_lower_prompts_are_computed_while_higher_requests_come_one_after_another() -> None:
    engine, clock = _beside(30)
    low = [request for request in engine.scheduler.requests() if request.priority == PRO]
    sequential_first_tokens(engine, clock, 60)
    assert sum(request.num_computed for request in low) > 1000
    while engine.has_work:
        engine.step()
    assert all(request.num_output == 16 for request in low)


def test_a_lower_prompt_that_has_waited_for_its_levels_is_not_held_back() -> None:
    engine, clock = machine(ageing_s=0.5, max_batch_tokens=64)
    low = ask(engine, 400, 0)
    clock.now += 1.1  # two levels
    ask(engine, 120, 2)
    engine.step()
    assert low.num_computed == 64


def test_steps_of_lower_prompts_are_short_only_while_higher_ones_come_and_go() -> None:
    engine, clock = machine()
    for _ in range(60):
        ask(engine, 500, PRO, num_tokens=1)

    def longest_step(number: int) -> float:
        took = []
        for _ in range(number):
            before = clock.now
            engine.step()
            took.append(clock.now - before)
        return max(took)

    longest_step(2)
    assert longest_step(3) > 0.5
    high = ask(engine, 60, ENTERPRISE)
    while not high.is_ended:
        engine.step()
    engine.step()
    assert longest_step(20) < 0.07  # 0.05, once the cost of a row in so short a step is known
    clock.now += 10.0
    engine.step()
    assert longest_step(3) > 0.5
