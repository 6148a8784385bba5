"""One thread owns the engine: submitting, cancelling, failing, draining and closing from other threads."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvarn.engine.engine import Engine
from kvarn.engine.handle import EventStream, RequestHandle, Ticket
from kvarn.engine.plan import Plan
from kvarn.engine.runner import Runner, Submission
from kvarn.errors import BackendError, CapacityError, InvalidParameter, RequestError
from kvarn.request import RequestState
from kvarn.types import FinishReason, SamplingParams, TokenEvent
from tests.unit.engine.fake import complete, make_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)
ENDLESS = GREEDY.replace(max_tokens=190)


class Gate:
    """A rule for FakeBackend that waits: the step in flight stays where the test wants it."""

    def __init__(self, engine: Engine) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self._rule = engine.backend.rule  # type: ignore[attr-defined]
        engine.backend.rule = self  # type: ignore[attr-defined]

    def __call__(self, tokens: Any) -> int:
        self.entered.set()
        assert self.opened.wait(30)
        return int(self._rule(tokens))


@pytest.fixture
def engine() -> Engine:
    return make_engine(num_blocks=300)


@pytest.fixture
def runner(engine: Engine) -> Iterator[Runner]:
    runner = Runner(engine)
    yield runner
    runner.close()


def eventually(is_true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def is_idle(runner: Runner) -> bool:
    """Asked on the engine's thread: nothing runs and no block is held."""

    def look(engine: Engine) -> bool:
        engine.kv.check()
        return not engine.has_work and engine.kv.num_free == engine.kv.num_blocks

    return runner.exclusively(look)


def test_a_handle_yields_every_token_and_then_ends(runner: Runner) -> None:
    handle = runner.submit([1, 2, 3], GREEDY)
    events = list(handle)
    assert [event.index for event in events] == list(range(15))
    assert {event.request_id for event in events} == {handle.id}
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert handle.result() is events[-1].completion
    assert handle.state is RequestState.FINISHED
    assert list(handle) == []
    assert is_idle(runner)


def test_requests_share_steps_and_do_not_mix(runner: Runner, engine: Engine) -> None:
    alone = [complete(make_engine(), [seed], GREEDY).token_ids for seed in (1, 2)]
    submissions = [Submission([1], GREEDY), Submission([2], GREEDY)]
    handles = runner.submit_all(submissions, Ticket(), Ticket())
    assert [handle.result().token_ids for handle in handles] == alone
    assert 2 in _sizes(engine)


def test_many_threads_get_what_each_would_get_alone(runner: Runner) -> None:
    answers = {}

    def ask(seed: int) -> None:
        answers[seed] = runner.submit([seed, seed + 1], GREEDY).result(30).token_ids

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert answers == {s: complete(make_engine(), [s, s + 1], GREEDY).token_ids for s in range(1, 13)}
    assert is_idle(runner)


def test_closing_a_stream_cancels_and_frees(runner: Runner) -> None:
    stream = EventStream(runner.submit([1, 2, 3], ENDLESS))
    next(stream)
    stream.close()
    assert list(stream) == []
    assert eventually(lambda: is_idle(runner))
    with pytest.raises(RequestError, match="closed before"):
        stream.completion()


def test_a_stream_that_is_dropped_unread_cancels_and_frees(runner: Runner, engine: Engine) -> None:
    gate = Gate(engine)
    EventStream(runner.submit([1, 2, 3], ENDLESS))
    gc.collect()
    gate.opened.set()
    assert eventually(lambda: is_idle(runner))
    assert len(_sizes(engine)) <= 2


def test_a_handle_that_is_dropped_runs_on(runner: Runner) -> None:
    events: list[TokenEvent] = []
    runner.submit([1, 2, 3], GREEDY, on_event=events.append)
    gc.collect()
    assert eventually(lambda: len(events) == 15)


def test_cancelling_is_honoured_within_one_step_and_keeps_what_was_said(runner: Runner, engine: Engine) -> None:
    gate = Gate(engine)
    handle = runner.submit([1, 2, 3], ENDLESS)
    assert gate.entered.wait(10)
    handle.cancel()
    gate.opened.set()
    completion = handle.result(10)
    assert completion.finish_reason is FinishReason.CANCELLED
    assert len(completion.token_ids) == 1
    handle.cancel()  # of an ended request: nothing happens
    assert is_idle(runner)


def test_a_waiting_request_can_be_cancelled() -> None:
    runner = Runner(make_engine(_slowly, num_blocks=50))  # of 4 tokens: one prompt fits beside no other
    running = runner.submit([1] * 150, GREEDY.replace(max_tokens=40))
    waiting = runner.submit([2] * 150, GREEDY)
    next(running)
    assert waiting.state is RequestState.WAITING
    waiting.cancel()
    assert waiting.result(10).token_ids == ()
    assert running.state is RequestState.RUNNING
    assert len(running.result(10).token_ids) == 40
    runner.close()


def test_n_answers_come_as_one_result_and_as_events_of_each_choice(runner: Runner) -> None:
    params = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=12, ignore_eos=True)
    handle = runner.submit([1, 2, 3, 4, 5, 6], params)
    events = list(handle)
    completion = handle.result()
    answers = [completion, *completion.alternatives]
    for choice, answer in enumerate(answers):
        assert [e.token_id for e in events if e.choice == choice] == list(answer.token_ids)
        assert answer.usage.completion_tokens == 12
    assert len({answer.token_ids for answer in answers}) == 4
    assert completion.token_ids == complete(make_engine(), [1, 2, 3, 4, 5, 6], params.replace(n=1)).token_ids
    assert eventually(lambda: is_idle(runner))


def test_n_answers_are_cancelled_together(runner: Runner) -> None:
    handle = runner.submit([1, 2, 3], ENDLESS.replace(n=3, max_tokens=60))
    next(handle)
    handle.cancel()
    completion = handle.result(10)
    assert {c.finish_reason for c in (completion, *completion.alternatives)} == {FinishReason.CANCELLED}
    assert eventually(lambda: is_idle(runner))


def test_a_tenant_never_finds_what_another_has_computed(runner: Runner) -> None:
    def cached(tenant: str) -> int:
        return runner.submit([1] * 40, GREEDY, tenant=tenant).result(10).usage.cached_tokens

    assert [cached("a"), cached("a"), cached("b")] == [0, 36, 0]


def test_a_refusal_is_raised_at_once_and_starts_nothing(runner: Runner) -> None:
    with pytest.raises(InvalidParameter, match="vocabulary"):
        runner.submit_all([Submission([1], GREEDY), Submission([999], GREEDY)], Ticket(), Ticket())
    assert is_idle(runner)


def test_waiting_may_time_out_and_go_on(runner: Runner, engine: Engine) -> None:
    gate = Gate(engine)
    handle = runner.submit([1, 2, 3], GREEDY)
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    gate.opened.set()
    assert len(handle.result(10).token_ids) == 15


def test_a_failure_is_raised_to_the_caller_whose_request_failed() -> None:
    runner = Runner(make_engine(lambda tokens: _boom() if 66 in tokens else 7))
    bad, good = runner.submit_all([Submission([66], GREEDY), Submission([7], GREEDY)], Ticket(), Ticket())
    with pytest.raises(BackendError, match="boom"):
        bad.result(10)
    with pytest.raises(BackendError, match="boom"):
        next(bad)
    assert bad.state is RequestState.FAILED
    assert good.result(10).token_ids == (7,) * 15
    runner.close()


def test_a_callback_that_raises_fails_its_own_request_only(runner: Runner) -> None:
    bad = runner.submit([1], ENDLESS, on_event=lambda event: _boom())
    good = runner.submit([2], GREEDY)
    with pytest.raises(RequestError, match=r"on_token of request .* raised RuntimeError: boom"):
        bad.result(10)
    assert len(good.result(10).token_ids) == 15
    assert eventually(lambda: is_idle(runner))


def test_a_callback_may_submit_but_not_wait(runner: Runner) -> None:
    found: list[Any] = []

    def on_event(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            found.append(runner.submit([5], GREEDY))
            with pytest.raises(RequestError, match="for ever"):
                found[0].result()
            found.append("refused")

    runner.submit([1], GREEDY, on_event=on_event)
    assert eventually(lambda: len(found) == 2)
    assert found[0].result(10).token_ids == complete(make_engine(), [5], GREEDY).token_ids


def test_work_runs_between_steps_once_there_is_room(runner: Runner, engine: Engine) -> None:
    handle = runner.submit([1] * 100, GREEDY.replace(max_tokens=50))
    next(handle)
    blocks = runner.exclusively(lambda engine: engine.kv.num_free, num_tokens=engine.kv.num_blocks * 4)
    assert blocks == engine.kv.num_blocks
    assert handle.state is RequestState.FINISHED


def test_what_work_raises_goes_to_its_caller(runner: Runner) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        runner.exclusively(lambda _: _boom())
    assert len(runner.submit([1], GREEDY).result(10).token_ids) == 15


def test_an_exception_outside_requests_ends_them_and_the_loop_goes_on(
    runner: Runner, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, left = engine.scheduler.plan, [1]

    def fail_once() -> Plan:
        if left and len(_sizes(engine)) == 3:
            left.pop()
            _boom()
        return plan()

    monkeypatch.setattr(engine.scheduler, "plan", fail_once)
    with pytest.raises(BackendError, match="outside any request: boom"):
        runner.submit([1], ENDLESS).result(10)
    assert len(runner.submit([1], GREEDY).result(10).token_ids) == 15
    assert runner.is_alive
    assert is_idle(runner)


def test_an_engine_that_keeps_failing_is_given_up_and_says_so(
    runner: Runner, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "step", _boom)
    with pytest.raises(BackendError, match="boom"):
        runner.submit([1], ENDLESS).result(10)
    assert eventually(lambda: not runner.is_alive)
    with pytest.raises(BackendError, match="gave up: boom"):
        runner.submit([1], GREEDY)


def test_a_stuck_step_is_reported_and_nobody_waits_for_it(engine: Engine) -> None:
    gate, runner = Gate(engine), Runner(engine, step_timeout_s=0.2)
    handle = runner.submit([1], GREEDY)
    waiting = threading.Thread(target=pytest.raises, args=(BackendError, runner.submit, [2], GREEDY))
    assert gate.entered.wait(10)
    waiting.start()
    with pytest.raises(BackendError, match=r"longer than step_timeout_s=0\.2"):
        handle.result(10)
    waiting.join(10)
    assert not waiting.is_alive()
    assert runner.is_stuck()
    assert not runner.is_alive
    with pytest.raises(BackendError, match="step_timeout_s"):
        runner.submit([1], GREEDY)
    gate.opened.set()  # the step comes back after all, and the loop serves again
    assert eventually(lambda: runner.is_alive)
    assert len(runner.submit([1], GREEDY).result(10).token_ids) == 15
    assert eventually(lambda: is_idle(runner))
    runner.close()


def test_closing_says_when_a_step_is_stuck_and_the_model_is_released_when_it_ends(engine: Engine) -> None:
    released = threading.Event()
    gate, runner = Gate(engine), Runner(engine, step_timeout_s=0.2, release=released.set)
    handle = runner.submit([1], GREEDY)
    with pytest.raises(BackendError):
        handle.result(10)
    with pytest.raises(BackendError, match="still running"):
        runner.close()
    assert not released.is_set()
    gate.opened.set()
    assert released.wait(10)


def test_an_idle_engine_waits_for_company_without_spinning() -> None:
    engine = make_engine(max_wait_ms=200)
    runner = Runner(engine)
    before = time.process_time()
    first = runner.submit([1], GREEDY.replace(max_tokens=1))
    second = runner.submit([2], GREEDY.replace(max_tokens=1))
    first.result(10), second.result(10)
    assert _sizes(engine) == [2]
    assert time.process_time() - before < 0.1
    runner.close()


def test_a_stopped_process_is_not_stuck_when_it_goes_on() -> None:
    code = (
        "import time\n"
        "from kvarn.engine.runner import Runner\n"
        "from kvarn.types import SamplingParams\n"
        "from tests.unit.engine.fake import make_engine\n"
        "runner = Runner(make_engine(lambda _: time.sleep(0.02) or 1), step_timeout_s=1)\n"
        "handle = runner.submit([1], SamplingParams(max_tokens=20, ignore_eos=True))\n"
        "next(handle)\n"
        "print('ready', flush=True)\n"
        "print(len(handle.result().token_ids))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == "20\n"
    assert process.returncode == 0


def test_long_work_that_gives_signs_of_life_is_not_stuck(engine: Engine) -> None:
    runner = Runner(engine, step_timeout_s=0.2)

    def work(_: Engine) -> int:
        for _ in range(10):
            time.sleep(0.05)
            runner.beat()
        return 7

    assert runner.exclusively(work) == 7
    runner.close()


def test_an_idle_runner_sleeps(runner: Runner) -> None:
    runner.submit([1], GREEDY).result(10)
    time.sleep(0.05)
    before = time.process_time(), runner.heartbeat
    time.sleep(0.3)
    assert time.process_time() - before[0] < 0.05
    assert runner.heartbeat == before[1]
    assert not runner.is_stuck(0.1)


def test_idle_memory_goes_back_to_the_system(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr("kvarn.engine.loop.COMPACT_AFTER_S", 0.05)
    monkeypatch.setattr("kvarn.engine.loop.FORGET_AFTER_S", 0.1)
    monkeypatch.setattr(engine.backend, "return_kv", returned.extend)
    runner = Runner(engine)
    handle = runner.submit([1] * 50, GREEDY)
    handle.result(10)
    num_blocks = engine.kv.blocks_for(50 + 14)
    assert eventually(lambda: len(set(returned)) >= num_blocks)
    assert len(returned) == len(set(returned))
    runner.close()


def test_draining_finishes_what_runs_and_refuses_what_comes(runner: Runner, engine: Engine) -> None:
    gate = Gate(engine)
    handles = [runner.submit([1], GREEDY)]
    assert gate.entered.wait(10)
    drained: list[bool] = []
    draining = threading.Thread(target=lambda: drained.append(runner.drain(20)))
    draining.start()
    gate.opened.set()
    draining.join(20)
    assert drained == [True]
    assert len(handles[0].result(0).token_ids) == 15
    with pytest.raises(CapacityError) as refused:
        runner.submit([1], GREEDY)
    assert refused.value.retry_after_s > 0


def test_draining_may_time_out(runner: Runner, engine: Engine) -> None:
    engine.backend.rule = _slowly  # type: ignore[attr-defined]
    runner.submit([1], GREEDY)
    assert not runner.drain(0.01)


def test_a_closed_runner_refuses_and_releases_once(engine: Engine) -> None:
    released: list[int] = []
    runner = Runner(engine, release=lambda: released.append(1))
    handle = runner.submit([1], ENDLESS)
    runner.close()
    runner.close()
    assert released == [1]
    with pytest.raises(RequestError, match="closed"):
        handle.result(1)
    with pytest.raises(RequestError, match="closed"):
        list(handle)
    for ask in (lambda: runner.submit([1], GREEDY), lambda: runner.exclusively(lambda _: 1), runner.drain):
        with pytest.raises(RequestError, match="closed"):
            ask()
    assert engine.kv.num_free == engine.kv.num_blocks


def test_a_callback_may_close(engine: Engine) -> None:
    released = threading.Event()
    runner = Runner(engine, release=released.set)
    handle = runner.submit([1], ENDLESS, on_event=lambda _: runner.close())
    assert released.wait(10)
    with pytest.raises(RequestError, match="closed"):
        handle.result(1)


def test_a_runner_nobody_refers_to_ends_its_thread(engine: Engine) -> None:
    released = threading.Event()
    runner = Runner(engine, release=released.set)
    runner.submit([1], GREEDY).result(10)
    there = weakref.ref(runner)
    del runner
    gc.collect()
    assert there() is None
    assert released.wait(10)


def test_a_handle_keeps_its_engine_alive(engine: Engine) -> None:
    handle: RequestHandle = Runner(engine).submit([1], GREEDY)
    gc.collect()
    assert len(handle.result(10).token_ids) == 15


def test_a_process_that_forgets_to_close_still_ends() -> None:
    code = (
        "from kvarn.engine.runner import Runner\n"
        "from kvarn.types import SamplingParams\n"
        "from tests.unit.engine.fake import make_engine\n"
        "runner = Runner(make_engine())\n"
        "handle = runner.submit([1], SamplingParams(max_tokens=190, ignore_eos=True))\n"
        "print(next(handle).index)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def _sizes(engine: Engine) -> list[int]:
    sizes: list[int] = engine.backend.batch_sizes  # type: ignore[attr-defined]
    return sizes


def _slowly(_: Any) -> int:
    time.sleep(0.005)
    return 1


def _boom() -> int:
    raise RuntimeError("boom")
