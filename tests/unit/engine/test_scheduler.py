"""Batches bounded by memory, time and priority; preemption, deadlines and cancellation in every state."""

from __future__ import annotations

import pytest

from kvarn.errors import Cancelled, DeadlineExceeded
from kvarn.request import RequestState
from kvarn.types import FinishReason, SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import SimulatedClock, completion_of, expected, is_idle, make_engine, run_to_end

LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPT = list(range(1, 60))


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    """What the hashing model says when its end token is ignored."""
    said: list[int] = []
    while len(said) < num_tokens:
        said += expected(prompt + said, num_tokens - len(said))
    return said


def test_a_request_starts_when_its_prompt_fits_and_the_longest_answer_is_not_set_aside() -> None:
    engine = make_engine(num_blocks=10)  # 40 tokens; two longest answers would take 76
    requests = [submit(engine, [n] * 8, LONG) for n in (1, 2)]
    engine.step()
    assert engine.scheduler.num_running == 2
    run_to_end(engine)
    assert [list(request.output_ids) for request in requests] == [answer([n] * 8, 30) for n in (1, 2)]
    assert engine.stats().preemptions >= 1
    assert is_idle(engine)


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_everybody_finishes_with_the_smallest_pools(num_blocks: int) -> None:
    engine = make_engine(num_blocks=num_blocks)
    requests = [submit(engine, [n, n, n], LONG) for n in range(1, 9)]
    events = run_to_end(engine, max_steps=1_000)
    room = num_blocks * 4 - 3
    for n, request in enumerate(requests, start=1):
        assert list(completion_of(events, request).token_ids) == answer([n, n, n], room)
    assert is_idle(engine)


def test_a_preempted_request_waits_with_its_tokens_and_without_blocks() -> None:
    engine = make_engine()
    request = submit(engine, PROMPT, LONG)
    for _ in range(8):
        engine.step()
    said = request.output_ids
    assert said
    engine.scheduler.preempt(request)
    assert (request.state, request.num_computed, request.output_ids) == (RequestState.WAITING, 0, said)
    assert engine.kv.stats().used == 0
    run_to_end(engine)
    assert list(request.output_ids) == answer(PROMPT, 30)
    assert request.num_preemptions == 1


def test_a_preempted_request_starts_again_from_blocks_that_are_still_cached() -> None:
    engine = make_engine(max_batch_tokens=64)
    request = submit(engine, PROMPT, LONG)
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(request)
    engine.step()
    assert engine.backend.batch_sizes[-1] <= 4  # type: ignore[attr-defined]


def test_no_more_than_max_running_run_at_once() -> None:
    engine = make_engine(max_running=2)
    for n in range(1, 6):
        submit(engine, [n], LONG)
    for _ in range(5):
        engine.step()
        assert engine.scheduler.num_running <= 2
    run_to_end(engine)


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    engine = make_engine(max_running=1, policy="priority")
    low = submit(engine, [1], LONG)
    engine.step()
    high = submit(engine, [2], LONG.replace(priority=1))
    engine.step()
    assert (low.state, high.state) == (RequestState.WAITING, RequestState.RUNNING)
    run_to_end(engine)
    assert list(low.output_ids) == answer([1], 30)
    assert low.ended_at is not None
    assert high.ended_at is not None
    assert high.ended_at < low.ended_at


def test_an_equal_priority_waits_for_its_turn() -> None:
    engine = make_engine(max_running=1, policy="priority")
    first, second = submit(engine, [1], LONG), submit(engine, [2], LONG)
    for _ in range(3):
        engine.step()
    assert (first.state, second.state) == (RequestState.RUNNING, RequestState.WAITING)


def test_a_changed_priority_changes_the_order() -> None:
    engine = make_engine(max_running=1, policy="priority")
    requests = [submit(engine, [n], LONG) for n in range(1, 5)]
    engine.reprioritise(requests[3], 5)
    engine.step()
    assert requests[3].state is RequestState.RUNNING


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5])
def test_low_priorities_slow_higher_ones_down_by_their_share_and_keep_their_blocks(share: float) -> None:
    clock = SimulatedClock(step_s=0.004, row_s=0.002)
    engine = make_engine(clock=clock, background_share=share, ageing_s=1e6, context=500, num_blocks=600)
    low = [submit(engine, [n], LONG.replace(max_tokens=400)) for n in (1, 2, 3)]
    for _ in range(10):
        engine.step()
    high = submit(engine, [9], LONG.replace(max_tokens=300, priority=1))
    while high.num_output < 1:
        engine.step()
    before, started_at = [r.num_output for r in low], clock.now
    while not high.is_ended:
        engine.step()
    slowdown = (clock.now - started_at) / (299 * 0.006)
    assert slowdown <= 1 / (1 - share) * 1.03
    assert all(request.state is RequestState.RUNNING for request in low)
    gained = [r.num_output - n for r, n in zip(low, before, strict=True)]
    assert min(gained) == 0 if share == 0 else min(gained) >= 0.7 * 299 * share
    assert engine.stats().preemptions == 0
    run_to_end(engine)


def test_ageing_lets_a_low_priority_finish_while_higher_ones_keep_coming() -> None:
    clock = SimulatedClock(step_s=0.010)
    engine = make_engine(clock=clock, background_share=0.0, ageing_s=0.5, policy="priority", max_running=2)
    low = submit(engine, [1], LONG)
    for n in range(500):
        if low.is_ended:
            break
        if engine.scheduler.num_waiting + engine.scheduler.num_running < 4:
            submit(engine, [2 + n % 200], LONG.replace(priority=2, max_tokens=8))
        engine.step()
    assert low.is_ended
    assert clock.now - low.submitted_at < 4 * 0.5 + 2


def test_a_long_prompt_stretches_the_steps_of_those_who_decode_by_no_more_than_allowed() -> None:
    clock = SimulatedClock(step_s=0.010, row_s=0.0005)
    engine = make_engine(clock=clock, max_batch_tokens=512, context=1500, num_blocks=600, max_stretch=2.0)
    for n in range(1, 5):
        submit(engine, [n], LONG.replace(max_tokens=150))
    for _ in range(20):
        engine.step()
    long = submit(engine, [7, 8, 9] * 333, LONG.replace(max_tokens=1))
    took = []
    while not long.is_ended:
        started_at = clock.now
        engine.step()
        took.append((clock.now - started_at) / 0.012)  # four decodes alone take 12 ms
    assert max(took) <= 2.05
    assert sorted(took)[len(took) // 2] >= 1.8
    assert engine.scheduler.num_running == 4


def test_a_prompt_alone_is_computed_in_the_largest_chunks() -> None:
    engine = make_engine(max_batch_tokens=32)
    submit(engine, PROMPT, LONG)
    engine.step()
    assert engine.backend.batch_sizes == [32]  # type: ignore[attr-defined]


def test_an_idle_engine_waits_for_company_but_not_longer_than_max_wait_ms() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock=clock, max_wait_ms=50)
    submit(engine, [1], LONG)
    assert engine.step() == []
    assert engine.wait_s == pytest.approx(0.050)
    clock.now += 0.030
    second = submit(engine, [2], LONG)
    assert engine.wait_s == pytest.approx(0.020)
    clock.now += 0.021
    assert len(engine.step()) == 2
    assert engine.wait_s == 0.0
    assert second.num_output == 1


def test_a_full_batch_does_not_wait_for_company() -> None:
    engine = make_engine(clock=SimulatedClock(), max_wait_ms=50, max_running=2)
    submit(engine, [1], LONG)
    submit(engine, [2], LONG)
    assert len(engine.step()) == 2


@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_a_deadline_ends_a_request_in_every_state(num_steps: int) -> None:
    clock = SimulatedClock()
    engine = make_engine(clock=clock)
    request = submit(engine, PROMPT, LONG.replace(deadline_s=5.0))
    events = [event for _ in range(num_steps) for event in engine.step()]
    clock.now += 4.9
    assert not request.is_ended
    clock.now += 0.2
    events += engine.step()
    completion = completion_of(events, request)
    assert completion.finish_reason is FinishReason.DEADLINE
    assert list(completion.token_ids) == answer(PROMPT, len(completion.token_ids))
    assert isinstance(request.error, DeadlineExceeded)
    assert is_idle(engine)


STATES = ["waiting", "prefilling", "decoding", "preempted", "following", "sitting out"]


@pytest.mark.parametrize("state", STATES)
def test_cancelling_frees_everything_within_one_step_in_every_state(state: str) -> None:
    engine = make_engine(background_share=0.0)
    request = submit(engine, PROMPT, LONG.replace(n=2))
    follower = submit(engine, PROMPT, LONG.replace(n=2), choice=1, fork_of=request)
    for _ in range({"waiting": 0, "prefilling": 2, "following": 2}.get(state, 7)):
        engine.step()
    if state == "preempted":
        engine.scheduler.preempt(request)
    if state == "sitting out":
        submit(engine, [1], LONG.replace(priority=3, max_tokens=2))
        engine.step()
    target = follower if state == "following" else request
    events_before = target.num_output
    target.is_cancel_requested = True
    events = engine.step()
    mine = [event for event in events if event.request_id == target.id]
    assert [event.finish_reason for event in mine] == [FinishReason.CANCELLED]
    assert isinstance(target.error, Cancelled)
    assert target.num_output == events_before
    assert engine.kv.num_tokens(target.id) == 0
    other = request if target is follower else follower
    run_to_end(engine)
    assert list(other.output_ids) == answer(PROMPT, 30)
    assert is_idle(engine)
