"""Alive means working: what counts as progress, and real processes whose engine stops making any."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvarn.config import EngineConfig
from kvarn.llm import LLM
from kvarn.request import ENDED
from kvarn.server.process.cpu_starvation import StarvationMeter
from kvarn.server.process.watchdog import CHECK_INTERVAL_S, NOTICE_S, Watchdog
from kvarn.types import SamplingParams
from tests.assets import smollm2
from tests.server.process import SMOLLM2, ServerProcess, model_path
from tests.unit.server.fake_threads import FakeThread

TIMEOUT_S = 5.0
LIFE_S = TIMEOUT_S - CHECK_INTERVAL_S  # a little before the timeout, so that the process is gone when it is over


@dataclass
class Heart:
    """An engine as the watchdog sees it."""

    sign_of_life: object | None = None
    is_alive: bool = True


class Minutes:
    """A clock and a watchdog that is made to check as its thread would."""

    def __init__(self, *hearts: Heart, tasks: Path = Path("/nowhere")) -> None:
        self.now = 100.0
        self.hearts = hearts
        self.watchdog = Watchdog(
            lambda: [(f"model {index}", heart) for index, heart in enumerate(self.hearts)],
            TIMEOUT_S,
            lambda: self.now,
            StarvationMeter(tasks),
        )
        self.watchdog.check()

    def pass_s(self, seconds: float, pulse_s: float = CHECK_INTERVAL_S) -> float:
        """Let time pass; returns what is left of the process's life."""
        left_s = LIFE_S
        for _ in range(round(seconds / pulse_s)):
            self.now += pulse_s
            left_s = self.watchdog.check()
        return left_s


def test_an_idle_engine_is_alive_for_ever() -> None:
    minutes = Minutes(Heart())
    assert minutes.pass_s(1000) == LIFE_S
    assert minutes.watchdog.stuck_model is None


def test_a_step_that_advances_is_alive_however_long_it_takes() -> None:
    heart = Heart((1.0, 0))
    minutes = Minutes(heart)
    for progress in range(100):
        heart.sign_of_life = (1.0, progress)
        assert minutes.pass_s(1.0) >= LIFE_S - 1.0 - CHECK_INTERVAL_S
    assert minutes.watchdog.stuck_model is None


def test_no_progress_fails_liveness_and_then_ends_the_process_within_the_timeout() -> None:
    heart = Heart()
    minutes = Minutes(Heart(), heart)
    heart.sign_of_life = (1.0, 5)  # its last one, at some moment after the last check
    assert minutes.pass_s(LIFE_S - NOTICE_S - CHECK_INTERVAL_S) > 0
    assert minutes.watchdog.stuck_model is None
    minutes.pass_s(2 * CHECK_INTERVAL_S)
    assert minutes.watchdog.stuck_model == "model 1"
    assert minutes.pass_s(NOTICE_S) == 0


def test_a_stuck_engine_that_comes_back_is_forgiven() -> None:
    heart = Heart((1.0, 5))
    minutes = Minutes(heart)
    minutes.pass_s(LIFE_S - NOTICE_S + CHECK_INTERVAL_S)
    assert minutes.watchdog.stuck_model is not None
    heart.sign_of_life = None
    assert minutes.pass_s(CHECK_INTERVAL_S) == LIFE_S
    assert minutes.watchdog.stuck_model is None


def test_an_engine_whose_thread_has_ended_is_not_alive() -> None:
    minutes = Minutes(Heart(is_alive=False))
    assert minutes.pass_s(LIFE_S + CHECK_INTERVAL_S) == 0


def test_time_for_which_the_process_stood_still_is_not_counted() -> None:
    heart = Heart((1.0, 5))
    minutes = Minutes(heart)
    minutes.now += 3600
    heart.sign_of_life = (2.0, 6)
    assert minutes.watchdog.check() >= LIFE_S - 2 * CHECK_INTERVAL_S


def test_a_starved_engine_fails_liveness_but_lives_until_it_had_time(tmp_path: Path) -> None:
    minutes = Minutes(Heart((1.0, 5)), tasks=tmp_path)
    thread = FakeThread(tmp_path / "7")
    for _ in range(40):  # 10 s, of which it runs one
        thread.take_turn(ran_s=0.1 * CHECK_INTERVAL_S, waited_s=0.9 * CHECK_INTERVAL_S)
        assert minutes.pass_s(CHECK_INTERVAL_S) > 0
    assert minutes.watchdog.stuck_model == "model 0"
    minutes.hearts[0].sign_of_life = (2.0, 0)
    assert minutes.pass_s(CHECK_INTERVAL_S) > LIFE_S / 2
    assert minutes.watchdog.stuck_model is None


def test_an_engine_that_gets_to_run_and_makes_no_progress_ends_the_process(tmp_path: Path) -> None:
    minutes = Minutes(Heart((1.0, 5)), tasks=tmp_path)
    thread = FakeThread(tmp_path / "7")
    for _ in range(round((LIFE_S + CHECK_INTERVAL_S) / CHECK_INTERVAL_S)):  # an endless loop beside as much other work
        thread.take_turn(ran_s=0.6 * CHECK_INTERVAL_S, waited_s=0.4 * CHECK_INTERVAL_S)
        left_s = minutes.pass_s(CHECK_INTERVAL_S)
    assert left_s == 0


def test_a_pulse_that_comes_late_is_an_excuse_and_asks_for_more_time() -> None:
    minutes = Minutes(Heart((1.0, 5)))
    assert minutes.pass_s(9.0, pulse_s=1.5) > LIFE_S  # looked at six times only
    assert minutes.watchdog.stuck_model == "model 0"
    assert minutes.pass_s(2 * LIFE_S) == 0  # now nothing is in the way


def test_an_unloaded_model_is_forgotten() -> None:
    minutes = Minutes(Heart((1.0, 5)))
    minutes.pass_s(3.0)
    minutes.hearts = ()
    assert minutes.pass_s(CHECK_INTERVAL_S) == LIFE_S


@pytest.fixture
def faulty() -> Iterator[ServerProcess]:
    with ServerProcess(
        "--model", model_path(SMOLLM2), "--context", "512", module="tests.server.faulty", is_patient=False
    ) as process:
        yield process


@pytest.mark.model
@pytest.mark.parametrize("fault", ["python-loop", "native-loop", "stuck-kernel"])
def test_an_engine_that_hangs_ends_the_process(faulty: ServerProcess, fault: str, patience: float) -> None:
    with faulty.client() as http:
        assert http.get("/health/live").status_code == 200
        assert http.post(f"/fault/{fault}").status_code == 200
        began = time.monotonic()
        _until_liveness(http, 503, began + 4 * patience * TIMEOUT_S)
        took_s = time.monotonic() - began
    assert took_s < TIMEOUT_S + 0.5 * (patience - 1)
    assert faulty.process.wait(4 * patience) not in (0, None)
    assert "Timeout" in faulty.log, "the stacks of all threads tell where it hung"
    with pytest.raises(httpx.ConnectError):
        httpx.get(faulty.url + "/health/live", trust_env=False)


def _until_liveness(http: httpx.Client, status: int, ends_at: float) -> None:
    """Ask until the answer is this; for 503 a closed port is as good."""
    while time.monotonic() < ends_at:
        try:
            if http.get("/health/live").status_code == status:
                return
        except httpx.TransportError:
            assert status == 503
            return
        time.sleep(0.05)
    raise AssertionError(f"/health/live did not become {status}")


@pytest.mark.model
def test_a_server_that_hardly_gets_to_run_is_slow_and_goes_on(faulty: ServerProcess, patience: float) -> None:
    """Stopped 19 of 20 moments, a step that takes longer than the timeout still comes to its end."""
    step_s = 1.5 * TIMEOUT_S
    body = {"model": SMOLLM2, "prompt": "One", "max_tokens": 1}
    with faulty.client() as http, ThreadPoolExecutor(1) as pool:
        assert http.post(f"/fault/slow?seconds={step_s}").status_code == 200
        answer = pool.submit(http.post, "/v1/completions", json=body, timeout=30 * patience)
        while not answer.done() and faulty.process.poll() is None:
            faulty.process.send_signal(signal.SIGSTOP)
            time.sleep(1.9)
            faulty.process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        assert answer.result().status_code == 200, faulty.log
        assert answer.result().elapsed.total_seconds() > TIMEOUT_S
        _until_liveness(http, 200, time.monotonic() + 4 * patience)


@pytest.mark.model
@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_native_step_gives_signs_of_life_all_the_time(threads: int) -> None:
    signs: list[tuple[float, int] | None] = []
    with LLM(smollm2(), config=EngineConfig(threads=threads, context=1024, max_batch_tokens=1024)) as llm:
        handle = llm.submit("word " * 300, SamplingParams(max_tokens=1))
        while handle.state not in ENDED:
            signs.append(llm.client.sign_of_life)
            time.sleep(0.002)
    busy = [sign for sign in signs if sign is not None]
    of_a_step = Counter(beat for beat, _ in set(busy))
    assert of_a_step.most_common(1)[0][1] > 20, "one step, one heartbeat, many signs of progress"


@pytest.mark.model
def test_health_answers_while_a_long_prompt_is_computed(server: ServerProcess, patience: float) -> None:
    prompt = "word " * 600
    with server.client() as http, server.client() as probe:
        body = {"model": SMOLLM2, "prompt": prompt, "max_tokens": 1, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            began = time.monotonic()
            answers = [probe.get("/health/live").status_code for _ in range(20)]
            took_s = time.monotonic() - began
            assert response.status_code == 200
            response.read()
    assert answers == [200] * 20
    assert took_s < 1.0 * patience


@pytest.mark.model
def test_a_server_put_aside_with_ctrl_z_goes_on_when_it_is_continued() -> None:
    timeout_s = 2.0
    arguments = ("--model", model_path(SMOLLM2), "--context", "512")
    with ServerProcess(*arguments, config=f"heartbeat_timeout_s = {timeout_s}\n") as server, server.client() as http:
        server.process.send_signal(signal.SIGTSTP)
        time.sleep(timeout_s + 1.0)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        assert http.get("/health/live").status_code == 200
        assert server.process.poll() is None
