"""Which threads could have run and were not let."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvarn.server.process.cpu_starvation import TASKS, StarvationMeter
from tests.unit.server.fake_threads import FakeThread


def test_the_most_starved_thread_counts(tmp_path: Path) -> None:
    threads = [FakeThread(tmp_path / name) for name in ("1", "2")]
    meter = StarvationMeter(tmp_path)
    assert meter.starved_s(1.0) == 0.0
    threads[0].take_turn(ran_s=0.8, waited_s=0.2)
    threads[1].take_turn(ran_s=0.1, waited_s=0.6)
    assert meter.starved_s(1.0) == pytest.approx(0.6)
    assert meter.starved_s(1.0) == 0.0


def test_a_thread_that_waits_for_its_turn_all_the_time_is_known_by_its_state(tmp_path: Path) -> None:
    thread = FakeThread(tmp_path / "1")
    meter = StarvationMeter(tmp_path)
    meter.starved_s(1.0)
    assert meter.starved_s(1.0) == 0.0  # it sleeps
    thread.become("R")
    assert meter.starved_s(1.0) == 1.0
    thread.take_turn(ran_s=0.0, waited_s=2.0)
    assert meter.starved_s(0.5) == 0.5, "what was waited before this look has been told"


def test_a_system_without_such_figures_starves_nobody(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    for meter in (StarvationMeter(tmp_path), StarvationMeter(tmp_path / "nowhere")):
        assert [meter.starved_s(1.0) for _ in range(2)] == [0.0, 0.0]


@pytest.mark.skipif(not TASKS.exists(), reason="the figures are Linux's")
def test_a_thread_that_shares_one_cpu_with_others_is_found_starved() -> None:
    code = (
        "import os, sys, threading, time\n"
        "from kvarn.server.process.cpu_starvation import StarvationMeter\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "others = [os.fork() for _ in range(1)]\n"
        "until = time.monotonic() + 0.8\n"
        "if 0 in others:\n"
        "    while time.monotonic() < until: pass\n"
        "    os._exit(0)\n"
        "meter = StarvationMeter()\n"
        "meter.starved_s(0.0)\n"
        "while time.monotonic() < until - 0.2: pass\n"
        "print(meter.starved_s(0.6))\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    starved_s = float(done.stdout)
    assert 0.1 < starved_s <= min(0.6, time.monotonic() - began)
