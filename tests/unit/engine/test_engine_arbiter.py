"""Engines of one process step in turns: never two at once, everybody its share, nobody waits for one that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.engine.engine_arbiter import BACKGROUND_SHARE, ArbiterSlot, Demand, EngineArbiter
from kvarn.errors import RequestError
from kvarn.types import SamplingParams
from tests.submitting import submit_to
from tests.unit.engine.fake import make_engine

LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


class Clock:
    """Time that passes only when a step says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stepper:
    """An engine that takes step after step, each of step_s on the common clock, until told to stop."""

    def __init__(self, street: Street, demand: Demand, step_s: float) -> None:
        self.num_steps = 0
        self.had_s = 0.0
        self.slot = street.arbiter.slot()
        self._street, self._demand, self._step_s = street, demand, step_s
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while self.slot.enter(lambda: self._demand, lambda: not self._street.is_over, lambda: None):
            self._street.step(self._step_s)
            self.num_steps += 1
            self.had_s += self._step_s
            self.slot.leave(wants_more=not self._street.is_over)
            if self._street.is_over:
                return


class Street:
    """Steppers at one arbiter, run until so much time has passed on its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.arbiter = EngineArbiter(self.clock)
        self.is_over = False
        self.num_inside = 0
        self.most_inside = 0

    def step(self, seconds: float) -> None:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        time.sleep(0.0002)  # the interpreter is let go, as in a native step
        self.clock.now += seconds
        self.num_inside -= 1

    def run(self, *steppers: Stepper, until_s: float) -> None:
        for stepper in steppers:
            stepper.thread.start()
        end = time.monotonic() + 60
        while self.clock.now < until_s and time.monotonic() < end:
            time.sleep(0.001)
        self.is_over = True
        for stepper in steppers:
            stepper.thread.join(10)
            assert not stepper.thread.is_alive()
        assert self.clock.now >= until_s, "the steppers hang"


def share_of(stepper: Stepper, *others: Stepper) -> float:
    return stepper.had_s / (stepper.had_s + sum(other.had_s for other in others))


def test_two_engines_never_step_at_the_same_time() -> None:
    street = Street()
    street.run(*(Stepper(street, Demand(), 0.01) for _ in range(3)), until_s=3.0)
    assert street.most_inside == 1


def test_equal_work_gets_equal_time_even_when_the_steps_of_one_are_ten_times_longer() -> None:
    street = Street()
    short, long = Stepper(street, Demand(4), 0.01), Stepper(street, Demand(4), 0.1)
    street.run(short, long, until_s=10.0)
    assert share_of(short, long) == pytest.approx(0.5, abs=0.06)
    assert short.num_steps > 5 * long.num_steps


def test_more_requests_get_more_time_but_never_all_of_it() -> None:
    street = Street()
    many, one = Stepper(street, Demand(64), 0.02), Stepper(street, Demand(1), 0.02)
    street.run(many, one, until_s=8.0)
    assert share_of(many, one) == pytest.approx(7 / 8, abs=0.06)  # 1 + log2(64) against 1


def test_lower_priorities_share_the_background_share_while_a_higher_one_has_work() -> None:
    street = Street()
    paid = Stepper(street, Demand(1, priority=10), 0.02)
    free = [Stepper(street, Demand(32), 0.02) for _ in range(2)]
    street.run(paid, *free, until_s=12.0)
    assert 1 - share_of(paid, *free) == pytest.approx(BACKGROUND_SHARE, abs=0.05)
    assert all(one.num_steps > 10 for one in free)  # and none of them starves


def test_an_engine_that_was_idle_has_saved_up_nothing_and_is_served_next() -> None:
    clock = Clock()
    arbiter = EngineArbiter(clock)
    busy, late = arbiter.slot(), arbiter.slot()
    for _ in range(100):
        enter(busy)
        clock.now += 1.0
        busy.leave(wants_more=True)
    enter(busy)
    called = entering(late)
    clock.now += 1.0
    busy.leave(wants_more=True)
    assert called()  # after the step in flight, not after a hundred seconds of them
    clock.now += 1.0
    late.leave(wants_more=True)
    assert late.served == pytest.approx(busy.served, abs=1.1)


def test_whoever_keeps_the_turn_and_stays_away_loses_it() -> None:
    arbiter = EngineArbiter()
    away, other = arbiter.slot(), arbiter.slot()
    enter(other)
    time.sleep(0.05)
    other.leave(wants_more=True)  # has had more time than `away`, which therefore keeps the turn
    enter(away)
    away.leave(wants_more=True)
    assert entering(other)()


def test_a_forfeited_turn_goes_to_the_next_and_its_late_end_takes_nothing_away() -> None:
    arbiter = EngineArbiter()
    stuck, other, third = arbiter.slot(), arbiter.slot(), arbiter.slot()
    enter(stuck)
    called = entering(other)
    stuck.forfeit()
    assert called()
    stuck.leave(wants_more=True)  # it came back after all
    assert not entering(third)(0.2)  # other is still inside


def test_waiting_ends_when_nobody_wants_the_turn_any_more() -> None:
    arbiter = EngineArbiter()
    first, second = arbiter.slot(), arbiter.slot()
    enter(first)
    signs: list[float] = []
    assert not second.enter(Demand, lambda: len(signs) < 3, lambda: signs.append(time.monotonic()))
    assert len(signs) >= 3  # it said meanwhile that it lives
    first.leave(wants_more=False)
    assert entering(second)()


@pytest.fixture
def clients() -> Iterator[list[EngineClient]]:
    arbiter = EngineArbiter()
    made = [EngineClient(make_engine(num_blocks=300), arbiter=arbiter) for _ in range(2)]
    yield made
    for client in made:
        client.close()


@contextmanager
def held(client: EngineClient) -> Iterator[None]:
    """The client has the turn and does not give it back meanwhile."""
    entered, opened = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        entered.set()
        assert opened.wait(60)

    done = client.compute(hold)
    assert entered.wait(10)
    try:
        yield
    finally:
        opened.set()
        done.result(10)


def test_two_engines_under_load_both_end_with_the_same_tokens_as_alone(
    clients: list[EngineClient],
) -> None:
    together = [submit_to(client, [number, 2, 3], LONG) for number in range(3) for client in clients]
    texts = [handle.result(60).token_ids for handle in together]
    assert texts[0::2] == texts[1::2]
    assert submit_to(clients[0], [0, 2, 3], LONG).result(60).token_ids == texts[0]


def test_an_engine_that_waits_for_its_turn_is_alive(clients: list[EngineClient], patience: float) -> None:
    blocked, waiting = clients
    with held(blocked):
        handle = submit_to(waiting, [1, 2], LONG)
        time.sleep(0.4 * patience)
        assert waiting.is_alive
        assert not waiting.is_stuck(0.3 * patience)
        assert blocked.is_stuck(0.3 * patience)
    assert len(handle.result(30).token_ids) == 150


def test_work_comes_with_its_own_priority(clients: list[EngineClient]) -> None:
    """Found here: work that came to one busy engine counted as priority 0, whatever it was."""
    busy, other = clients
    with held(busy):
        answer = other.compute(lambda _: other._thread.turn._slot.demand.priority, priority=20)
        time.sleep(0.05)
    assert answer.result(10) == 20
    assert other.compute(lambda _: other._thread.turn._call_priority).result(10) == 0


def test_closing_an_engine_that_waits_does_not_wait_for_the_other(clients: list[EngineClient], patience: float) -> None:
    blocked, waiting = clients
    with held(blocked):
        handle = submit_to(waiting, [1, 2], LONG)
        started = time.monotonic()
        waiting.close()
        assert time.monotonic() - started < 1.0 * patience
        with pytest.raises(RequestError, match="closed"):
            handle.result(5)


def test_closing_one_engine_in_the_middle_of_its_work_leaves_the_turn_to_the_other(clients: list[EngineClient]) -> None:
    submit_to(clients[0], [1, 2, 3], LONG)
    handle = submit_to(clients[1], [1, 2, 3], LONG)
    clients[0].close()
    assert len(handle.result(30).token_ids) == 150


def test_long_work_lets_others_step_between_its_own_steps(clients: list[EngineClient]) -> None:
    working, other = clients
    is_done = threading.Event()

    def work(engine: Engine) -> int:
        for rounds in range(10_000):
            engine.offer_turn()
            time.sleep(0.001)
            if is_done.is_set():
                return rounds
        raise AssertionError("the other engine never got a turn")

    answer = working.compute(work)
    assert len(submit_to(other, [1, 2, 3], LONG).result(60).token_ids) == 150
    is_done.set()
    assert answer.result(30) > 0


def test_a_failing_piece_of_work_gives_the_turn_back(clients: list[EngineClient]) -> None:
    def fail(_: object) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        clients[0].compute(fail).result()
    assert len(submit_to(clients[1], [1, 2, 3], LONG).result(30).token_ids) == 150


def enter(lane: ArbiterSlot) -> None:
    assert lane.enter(Demand, lambda: True, lambda: None)


def entering(lane: ArbiterSlot) -> Callable[..., bool]:
    """Enter on another thread; the answer tells whether that has succeeded in time."""
    entered = threading.Event()

    def wait() -> None:
        enter(lane)
        entered.set()

    threading.Thread(target=wait, daemon=True).start()
    end = time.monotonic() + 10
    while not lane.is_waiting and not entered.is_set() and time.monotonic() < end:
        time.sleep(0.001)
    return lambda timeout_s=10.0: entered.wait(timeout_s)
