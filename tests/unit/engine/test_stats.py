"""The numbers an engine tells about itself."""

from __future__ import annotations

import pytest

from kvarn.types import SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import SimulatedClock, make_engine, run_to_end

LONG = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def test_stats_count_requests_blocks_tokens_and_steps() -> None:
    clock = SimulatedClock(step_s=0.010)
    engine = make_engine(clock=clock, max_running=2)
    for n in (1, 2, 3):
        submit(engine, [n] * 9, LONG)
    for _ in range(3):
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.steps) == (2, 1, 3)
    assert (stats.blocks_total, stats.blocks_used) == (64, 6)
    assert stats.step_s == pytest.approx(0.010)
    run_to_end(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.generated_tokens == 30
    assert stats.prompt_tokens == 3 * 9 - 3  # a prompt's last row gives the first token of the answer
    assert stats.tokens_per_s == pytest.approx(30 / (stats.steps * 0.010))
    assert stats.blocks_cached > 0
    assert stats.preemptions == 0


def test_time_outside_the_backend_is_overhead() -> None:
    clock = SimulatedClock(step_s=0.010)
    assert make_engine(clock=clock).stats().overhead_share == 0.0
    engine = make_engine(clock=clock)
    read = engine.stream.read

    def slow_read(commits):  # type: ignore[no-untyped-def]
        clock.now += 0.010
        return read(commits)

    engine.stream.read = slow_read  # type: ignore[method-assign]
    submit(engine, [1], LONG)
    run_to_end(engine)
    assert engine.stats().overhead_share == pytest.approx(0.5, abs=0.1)  # sampling takes real time
