"""Prompt chunks sized by measured time, and the share of low priorities."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from kvarn.engine.scheduling.pacing import FIRST_ROWS, FREE_S, REFRESH_STEPS, BackgroundShare, Pacer

BASE_S, ROW_S = 0.010, 0.0004


def steps(pacer: Pacer, num_steps: int, *, num_decodes: int = 4, noise: float = 0.0, seed: int = 0) -> list[int]:
    """Run a simulated machine with an endless prompt; the prompt rows of each step."""
    rng, rows_of = random.Random(seed), []
    for _ in range(num_steps):
        rows = pacer.prompt_rows(num_decodes)
        seconds = (BASE_S if num_decodes else 0.002) + ROW_S * rows
        pacer.observe(num_decodes, rows, seconds * (1 + noise * rng.random() + 3 * noise * (rng.random() < 0.05)))
        rows_of.append(rows)
    return rows_of


def test_with_nobody_decoding_a_chunk_is_as_long_as_allowed() -> None:
    assert Pacer(2.0, 0.150, 512).prompt_rows(0) == 512


def test_a_step_goes_without_prompts_until_it_is_known_how_long_that_takes() -> None:
    pacer = Pacer(2.0, 0.150, 512)
    assert pacer.prompt_rows(4) == 0
    pacer.observe(4, 0, BASE_S)
    assert pacer.prompt_rows(4) == FIRST_ROWS


@pytest.mark.parametrize("stretch", [1.5, 2.0, 4.0])
def test_chunks_settle_where_the_step_takes_max_stretch_times_as_long(stretch: float) -> None:
    rows = steps(Pacer(stretch, 1.0, 512), 60)[20:]
    times = [BASE_S + ROW_S * n for n in rows if n]
    assert max(times) <= stretch * BASE_S * 1.01
    assert min(times) >= stretch * BASE_S * 0.93


def test_no_step_with_a_prompt_takes_longer_than_prefill_ms() -> None:
    rows = steps(Pacer(50.0, 0.030, 512), 60)[20:]
    assert 0.028 <= max(BASE_S + ROW_S * n for n in rows) <= 0.0301


def test_noise_and_outliers_do_not_upset_the_chunks() -> None:
    rows = [n for n in steps(Pacer(2.0, 0.150, 512), 400, noise=0.2)[20:] if n]
    times = sorted((BASE_S + ROW_S * n) / BASE_S for n in rows)
    assert times[len(times) // 2] == pytest.approx(2.0, abs=0.35)
    assert times[int(len(times) * 0.99)] < 2.8


def known_pacer(free_rows: int = 2048, row_s: float = 2e-5, prefill_s: float = 0.150) -> Pacer:
    """Of a device that computes a row of a prompt in row_s, seen in one step with and one without a prompt."""
    pacer = Pacer(2.0, prefill_s, 8192, 256, free_rows)
    pacer.observe(4, 0, BASE_S)
    pacer.observe(4, 256, BASE_S + 256 * row_s)
    return pacer


def test_a_crowd_fills_a_free_step_at_once() -> None:
    assert known_pacer().prompt_rows(4) == 2048 - 4, "the step has no more rows than are free, decodes included"
    assert known_pacer(free_rows=0).prompt_rows(4) <= 2 * 256


def test_free_rows_of_a_slow_device_are_those_that_take_a_short_time() -> None:
    row_s = 1e-4
    assert known_pacer(row_s=row_s).prompt_rows(4) * row_s == pytest.approx(FREE_S, abs=row_s)


def test_free_rows_do_not_make_a_step_longer_than_prefill_ms() -> None:
    row_s = 4e-5
    assert BASE_S + known_pacer(row_s=row_s, prefill_s=0.030).prompt_rows(4) * row_s <= 0.0301


def test_a_step_with_decodes_never_has_more_rows_than_are_free() -> None:
    """Larger ones are launched kernel by kernel, which takes as long as ten steps of free rows on a small model."""
    pacer, decodes, rows = known_pacer(), 4, []
    for _ in range(40):
        rows.append(pacer.prompt_rows(decodes))
        pacer.observe(decodes, rows[-1], BASE_S + 1e-6 * rows[-1])  # there is always room for more
    assert max(rows) == 2048 - decodes


def test_chunks_grow_at_most_twofold_from_step_to_step() -> None:
    rows = [n for n in steps(Pacer(20.0, 1.0, 4096), 12) if n]
    assert all(b <= max(FIRST_ROWS, 2 * a) for a, b in itertools.pairwise(rows))


def test_now_and_then_a_step_goes_without_prompts_to_measure_again() -> None:
    rows = steps(Pacer(2.0, 0.150, 512), 4 * REFRESH_STEPS)
    assert 6 <= rows.count(0) <= 8


def test_a_machine_that_slows_down_as_a_whole_does_not_starve_the_prompt() -> None:
    """Other programs take half of the processor for a while: decodes and prompts suffer alike, so chunks stay."""
    pacer = Pacer(2.0, 0.150, 512)
    usual = steps(pacer, 50)[-1]
    slow = []
    for _ in range(300):
        rows = pacer.prompt_rows(4)
        pacer.observe(4, rows, 2 * (BASE_S + ROW_S * rows))
        slow.append(rows)
    assert statistics.mean(slow) > 0.8 * usual
    assert statistics.mean(slow[50:]) > 0.9 * usual
    again = steps(pacer, 300)
    assert statistics.mean(again) < 1.2 * usual
    assert max(again[40:]) <= usual + 1


def test_a_cost_that_comes_with_the_first_row_does_not_pin_chunks_to_one_row() -> None:
    """Kernels work in tiles, so one row may cost as much as four; a bad moment must not be for ever."""
    pacer, took = Pacer(2.0, 0.150, 512), []
    for n in range(200):
        rows = pacer.prompt_rows(4)
        is_disturbed = 40 <= n < 70 and rows > 0
        seconds = BASE_S + (0.006 + 0.0002 * rows if rows else 0.0)
        pacer.observe(4, rows, 5 * seconds if is_disturbed else seconds)
        took.append(rows)
    assert min(n for n in took[40:70] if n) == 1
    assert max(took[150:]) in range(18, 22)


def test_a_prompt_advances_even_when_decoding_alone_takes_longer_than_prefill_ms() -> None:
    pacer = Pacer(2.0, 0.005, 512)
    rows = steps(pacer, 30)
    assert min(rows[1:]) >= 1


def test_the_time_of_a_prompt_is_estimated_from_prompts_that_ran() -> None:
    pacer = Pacer(2.0, 0.150, 512)
    assert pacer.seconds_for(1000) == 0.0
    steps(pacer, 3, num_decodes=0)
    assert pacer.seconds_for(1000) == pytest.approx(1000 * ROW_S, rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5])
def test_the_background_gets_its_share_of_time_and_no_more(share: float) -> None:
    budget, background_s, total_s = BackgroundShare(share, 0.150), 0.0, 0.0
    for _ in range(2_000):
        extra_s = 0.007 if budget.may_run(False) else 0.0
        budget.settle(0.010 + extra_s, extra_s)
        background_s += extra_s
        total_s += 0.010 + extra_s
    assert background_s / total_s <= share + 0.01
    assert background_s / total_s >= min(share, 0.41) - 0.01


def test_a_full_share_always_runs() -> None:
    budget = BackgroundShare(1.0, 0.150)
    budget.settle(0.010, 0.010)
    assert budget.may_run(False)
    assert budget.may_run(True)


def test_the_background_waits_long_before_it_delays_a_prompt() -> None:
    budget, saved_s = BackgroundShare(0.125, 0.050), []
    for has_prompts in (False, True):
        total_s = 0.0
        while not budget.may_run(has_prompts):
            budget.settle(0.010, 0.0)
            total_s += 0.010
        saved_s.append(0.125 * total_s)
    assert saved_s == pytest.approx([0.00125, 0.8], abs=0.003)  # one after the other: nothing, and 16 times 50 ms
