"""What fails on the engine's thread: whose request it ends, what goes on, and when a step counts as stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.engine.handle import OutputCollector
from kvarn.engine.scheduling.plan import StepPlan
from kvarn.engine.submission import Submission
from kvarn.errors import BackendError, DeviceLost, RequestError
from kvarn.request import RequestState
from tests.submitting import submit_to
from tests.unit.engine.fake import make_engine
from tests.unit.engine.stepping import ENDLESS, GREEDY, Gate, batch_sizes, boom, eventually, is_idle


def test_a_failure_is_raised_to_the_caller_whose_request_failed() -> None:
    client = EngineClient(make_engine(lambda tokens: boom() if 66 in tokens else 7))
    bad, good = client.submit_all(
        [Submission([66], GREEDY), Submission([7], GREEDY)], OutputCollector(), OutputCollector()
    )
    with pytest.raises(BackendError, match="boom"):
        bad.result(10)
    with pytest.raises(BackendError, match="boom"):
        next(bad)
    assert bad.state is RequestState.FAILED
    assert good.result(10).token_ids == (7,) * 15
    client.close()


def test_a_callback_that_raises_fails_its_own_request_only(client: EngineClient) -> None:
    bad = submit_to(client, [1], ENDLESS, on_event=lambda event: boom())
    good = submit_to(client, [2], GREEDY)
    with pytest.raises(RequestError, match=r"on_token of request .* raised RuntimeError: boom"):
        bad.result(10)
    assert len(good.result(10).token_ids) == 15
    assert eventually(lambda: is_idle(client))


def test_what_work_raises_goes_to_its_caller(client: EngineClient) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        client.compute(lambda _: boom()).result()
    assert len(submit_to(client, [1], GREEDY).result(10).token_ids) == 15


def test_an_exception_outside_requests_ends_them_and_the_loop_goes_on(
    client: EngineClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, left = engine.scheduler.plan, [1]

    def fail_once(newest: StepPlan | None = None) -> StepPlan:
        if left and len(batch_sizes(engine)) == 3:
            left.pop()
            boom()
        return plan(newest)

    monkeypatch.setattr(engine.scheduler, "plan", fail_once)
    with pytest.raises(BackendError, match="outside any request: boom"):
        submit_to(client, [1], ENDLESS).result(10)
    assert len(submit_to(client, [1], GREEDY).result(10).token_ids) == 15
    assert client.is_alive
    assert is_idle(client)


def test_an_engine_that_keeps_failing_is_given_up_and_says_so(
    client: EngineClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "step", boom)
    with pytest.raises(BackendError, match="boom"):
        submit_to(client, [1], ENDLESS).result(10)
    assert eventually(lambda: not client.is_alive)
    with pytest.raises(BackendError, match="gave up: boom"):
        submit_to(client, [1], GREEDY)


def test_a_backend_lost_while_idle_is_told_without_a_step(
    client: EngineClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.backend, "lost", DeviceLost("the device is gone"))
    assert not client.is_alive
    with pytest.raises(BackendError, match="gave up: the device is gone; load the model again"):
        submit_to(client, [1], GREEDY)


def test_a_stuck_step_is_reported_and_nobody_waits_for_it(engine: Engine) -> None:
    gate, client = Gate(engine), EngineClient(engine, step_timeout_s=0.6)
    handle = submit_to(client, [1], GREEDY)
    waiting = threading.Thread(target=pytest.raises, args=(BackendError, client.submit, [2], GREEDY))
    assert gate.entered.wait(10)
    waiting.start()
    with pytest.raises(BackendError, match=r"longer than step_timeout_s=0\.6"):
        handle.result(10)
    waiting.join(10)
    assert not waiting.is_alive()
    assert client.is_stuck()
    assert not client.is_alive
    with pytest.raises(BackendError, match="step_timeout_s"):
        submit_to(client, [1], GREEDY)
    gate.opened.set()  # the step comes back after all, and the loop serves again
    assert eventually(lambda: client.is_alive)
    assert len(submit_to(client, [1], GREEDY).result(10).token_ids) == 15
    assert eventually(lambda: is_idle(client))
    client.close()


def test_closing_says_when_a_step_is_stuck_and_the_model_is_released_when_it_ends(engine: Engine) -> None:
    released = threading.Event()
    gate, client = Gate(engine), EngineClient(engine, step_timeout_s=0.2, release=released.set)
    handle = submit_to(client, [1], GREEDY)
    with pytest.raises(BackendError):
        handle.result(10)
    with pytest.raises(BackendError, match="still running"):
        client.close()
    assert not released.is_set()
    gate.opened.set()
    assert released.wait(10)


def test_a_stopped_process_is_not_stuck_when_it_goes_on() -> None:
    code = (
        "import time\n"
        "from kvarn.engine.client import EngineClient\n"
        "from kvarn.types import SamplingParams\n"
        "from tests.submitting import submit_to\n"
        "from tests.unit.engine.fake import make_engine\n"
        "client = EngineClient(make_engine(lambda _: time.sleep(0.02) or 1), step_timeout_s=1)\n"
        "handle = submit_to(client, [1], SamplingParams(max_tokens=20, ignore_eos=True))\n"
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
    client = EngineClient(engine, step_timeout_s=0.2)

    def work(working: Engine) -> int:
        for _ in range(10):
            time.sleep(0.05)
            working.offer_turn()
        return 7

    assert client.compute(work).result() == 7
    client.close()


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "runs-ahead"])
def test_a_lost_device_fails_what_runs_and_nothing_is_accepted_any_more(runs_ahead: bool) -> None:
    engine = make_engine(runs_ahead=runs_ahead, faults={k: DeviceLost("the device is lost") for k in range(4, 400)})
    client = EngineClient(engine)
    submissions = [Submission([token], ENDLESS) for token in (1, 2, 3)]
    for handle in client.submit_all(submissions, *(OutputCollector() for _ in submissions)):
        with pytest.raises(BackendError, match="the device is lost"):
            handle.result(10)
    assert eventually(lambda: not client.is_alive)
    with pytest.raises(BackendError, match="the device is lost"):
        submit_to(client, [4], GREEDY)
