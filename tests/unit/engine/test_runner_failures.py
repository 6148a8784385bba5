"""What fails on the engine's thread: whose request it ends, what goes on, and when a step counts as stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from kvarn.engine.engine import Engine
from kvarn.engine.handle import Ticket
from kvarn.engine.runner import Runner, Submission
from kvarn.engine.scheduling.plan import StepPlan
from kvarn.errors import BackendError, RequestError
from kvarn.request import RequestState
from tests.unit.engine.fake import make_engine
from tests.unit.engine.stepping import ENDLESS, GREEDY, Gate, batch_sizes, boom, eventually, is_idle


def test_a_failure_is_raised_to_the_caller_whose_request_failed() -> None:
    runner = Runner(make_engine(lambda tokens: boom() if 66 in tokens else 7))
    bad, good = runner.submit_all([Submission([66], GREEDY), Submission([7], GREEDY)], Ticket(), Ticket())
    with pytest.raises(BackendError, match="boom"):
        bad.result(10)
    with pytest.raises(BackendError, match="boom"):
        next(bad)
    assert bad.state is RequestState.FAILED
    assert good.result(10).token_ids == (7,) * 15
    runner.close()


def test_a_callback_that_raises_fails_its_own_request_only(runner: Runner) -> None:
    bad = runner.submit([1], ENDLESS, on_event=lambda event: boom())
    good = runner.submit([2], GREEDY)
    with pytest.raises(RequestError, match=r"on_token of request .* raised RuntimeError: boom"):
        bad.result(10)
    assert len(good.result(10).token_ids) == 15
    assert eventually(lambda: is_idle(runner))


def test_what_work_raises_goes_to_its_caller(runner: Runner) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        runner.exclusively(lambda _: boom())
    assert len(runner.submit([1], GREEDY).result(10).token_ids) == 15


def test_an_exception_outside_requests_ends_them_and_the_loop_goes_on(
    runner: Runner, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, left = engine.scheduler.plan, [1]

    def fail_once() -> StepPlan:
        if left and len(batch_sizes(engine)) == 3:
            left.pop()
            boom()
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
    monkeypatch.setattr(engine, "step", boom)
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
