"""Policies and schedules as pure functions: which positions are filled, and how many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvarn.decoding.denoise_config import policy_values
from kvarn.decoding.remasking import RULES, Candidates, PolicyValues, positions_to_edit
from kvarn.decoding.schedules import even_count, first_filling_step, steps_of_block, timestep_count, transfer_share
from kvarn.diffusion import POLICIES, POLICY_FIELDS, DiffusionParams
from kvarn.errors import InvalidParameter


def candidates_of(
    confidences: list[float], count: int = 1, positions: list[int] | None = None, **more: Any
) -> Candidates:
    values = np.array(confidences)
    given = {
        "positions": np.array(positions or range(10, 10 + len(values))),
        "confidences": values,
        "entropies": 1 - values,
        "margins": values,
        "noise": np.linspace(0.05, 0.95, len(values)),
        "count": count,
        "share": 0.5,
    }
    return Candidates(**given | more)


def filled(policy: Any, candidates: Candidates, **options: Any) -> list[int]:
    """Indices of the candidates that a policy fills."""
    return np.flatnonzero(RULES[policy].choose(candidates, values_of(policy, **options))).tolist()


def values_of(policy: Any, **options: Any) -> PolicyValues:
    return policy_values(DiffusionParams(policy=policy, **options))


def test_every_policy_is_known() -> None:
    assert set(RULES) == set(POLICIES)


@pytest.mark.parametrize("policy", ["low_confidence", "maskgit_plus", "topk_margin", "entropy"])
def test_ranking_policies_take_the_count_best_and_ties_go_left(policy: str) -> None:
    assert filled(policy, candidates_of([0.2, 0.7, 0.7, 0.9, 0.7], count=3)) == [1, 2, 3]


def test_entropy_prefers_the_smallest() -> None:
    assert filled("entropy", candidates_of([0.9, 0.1], entropies=np.array([2.0, 0.3]))) == [1]


def test_random_looks_at_noise_alone() -> None:
    assert filled("random", candidates_of([0.9, 0.8, 0.1], count=2, noise=np.array([0.1, 0.9, 0.5]))) == [1, 2]


def test_origin_draws_at_random_for_each_position() -> None:
    assert filled("origin", candidates_of([0.9, 0.8, 0.1], noise=np.array([0.6, 0.4, 0.1]), share=0.5)) == [1, 2]


def test_threshold_takes_all_that_reach_it_and_at_least_the_best() -> None:
    assert filled("threshold", candidates_of([0.9, 0.5, 0.95, 0.89])) == [0, 2]
    assert filled("threshold", candidates_of([0.1, 0.3, 0.2])) == [1]
    assert filled("threshold", candidates_of([0.1, 0.3, 0.2], count=2)) == [1, 2]


def test_factor_takes_the_largest_number_whose_last_is_sure_enough() -> None:
    # With factor 1 the n-th best needs 1 - 1 / (n + 1): 0.5, 0.667, 0.75, 0.8.
    assert filled("factor", candidates_of([0.76, 0.9, 0.7, 0.95])) == [0, 1, 3]
    assert filled("factor", candidates_of([0.3, 0.4])) == [1]


def test_entropy_exit_takes_all_that_are_calm() -> None:
    assert filled("entropy_exit", candidates_of([0.1] * 4, entropies=np.array([1.4, 1.5, 0.2, 3.0]))) == [0, 2]
    assert filled("entropy_exit", candidates_of([0.1] * 3, entropies=np.array([3.0, 2.0, 2.5]))) == [1]


def test_local_leap_reaches_out_from_sure_positions() -> None:
    candidates = candidates_of([0.8, 0.95, 0.8, 0.7, 0.8], positions=[10, 14, 18, 15, 19])
    assert filled("local_leap", candidates) == [0, 1, 2]
    assert filled("local_leap", candidates_of([0.8, 0.85])) == [1]


def test_hierarchy_halves_every_run_of_masked_positions() -> None:
    candidates = candidates_of([0.5, 0.6, 0.3, 0.35, 0.95], positions=[10, 11, 20, 21, 30])
    assert filled("hierarchy", candidates) == [1, 4]


def test_joint_threshold_replaces_what_is_surely_something_else() -> None:
    confidences, is_other = np.array([0.95, 0.95, 0.6]), np.array([True, False, True])
    surely = values_of("joint_threshold", edit_threshold=0.9)
    assert positions_to_edit(confidences, is_other, surely).tolist() == [True, False, False]
    assert positions_to_edit(confidences, is_other, values_of("joint_threshold")).tolist() == [True, False, True]


def test_the_values_of_a_policy_are_its_authors() -> None:
    joint = values_of("joint_threshold")
    assert (joint.threshold, joint.edit_threshold, joint.max_post_edit_steps) == (0.5, 0.0, 16)
    assert values_of("threshold").threshold == 0.9
    assert values_of("local_leap", radius=2).radius == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_every_field_of_another_policy_is_refused_by_name(policy: Any) -> None:
    names = {name for fields in POLICY_FIELDS.values() for name in fields}
    for name in names - POLICY_FIELDS.get(policy, {}).keys():
        with pytest.raises(InvalidParameter, match=f"{name} has no meaning for policy '{policy}'") as error:
            DiffusionParams(policy=policy, **{name: 1})
        assert error.value.field == name
    for name in POLICY_FIELDS.get(policy, {}):
        assert getattr(values_of(policy, **{name: 1}), name) == 1


def test_alg_temp_draws_positions_and_a_small_one_changes_nothing() -> None:
    confidences = [0.2, 0.7, 0.6, 0.9]
    assert filled("entropy", candidates_of(confidences, count=2), alg_temp=1e-6) == [1, 3]
    rng = np.random.default_rng(0)
    draws = [
        filled("low_confidence", candidates_of([0.0, 1.0], noise=rng.random(2)), alg_temp=1.0)[0] for _ in range(4000)
    ]
    assert np.mean(draws) == pytest.approx(np.e / (1 + np.e), abs=0.03)


@pytest.mark.parametrize(("num_masked", "num_steps"), [(32, 32), (32, 5), (7, 3), (4, 9)])
def test_an_even_split_fills_everything_the_larger_shares_first(num_masked: int, num_steps: int) -> None:
    counts = [even_count(num_masked, num_steps, step) for step in range(num_steps)]
    assert sum(counts) == num_masked
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


def test_steps_are_split_over_blocks() -> None:
    assert [steps_of_block(10, 4, index) for index in range(4)] == [3, 3, 2, 2]
    assert [steps_of_block(2, 4, index) for index in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("num_steps", [1, 4, 32, 50])
def test_timesteps_fill_everything_by_the_last_step(num_steps: int) -> None:
    left = 32
    times = np.linspace(1, 1e-3, num_steps + 1)
    for step in range(num_steps):
        count = timestep_count(left, num_steps, step)
        if step < num_steps - 1:
            assert count == int(left * (1 - times[step + 1] / times[step]))
        left -= count
    assert left == 0
    assert transfer_share(num_steps, num_steps - 1) == 1.0


@pytest.mark.parametrize("num_steps", [1, 7, 40, 500])
def test_steps_that_fill_nothing_are_passed_over(num_steps: int) -> None:
    for num_left in (1, 3, 32):
        for step in range(0, num_steps, 3):
            found = first_filling_step(num_left, num_steps, step)
            assert found == next(i for i in range(step, num_steps) if timestep_count(num_left, num_steps, i))
    assert 0 < first_filling_step(32, 2**31 - 1, 0) < 2**31
