"""Filters, penalties and the sampling of a token."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvarn.backends.batch import RowSampling
from kvarn.sampling.filters import drop_top_choices, keep_min_p, keep_top_k, keep_top_p, keep_typical
from kvarn.sampling.penalties import penalise_counts, penalise_repetition
from kvarn.sampling.philox import uniform
from kvarn.sampling.sampler import applies_xtc, apply_penalties, candidates, choose

Float32 = npt.NDArray[np.float32]

logit_rows = arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32))
shares = st.floats(0.01, 0.99)


def weights_of(logits: Float32) -> npt.NDArray[np.float64]:
    ordered = np.sort(logits.astype(np.float64))[::-1]
    return np.exp(ordered - ordered[0])


def ids(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


@given(logit_rows, st.integers(0, 50))
def test_top_k_keeps_k_or_all(logits: Float32, k: int) -> None:
    assert list(keep_top_k(np.argsort(-logits), k)) == list(range(min(k or len(logits), len(logits))))


@given(logit_rows, shares)
def test_top_p_keeps_the_shortest_prefix_with_the_mass(logits: Float32, mass: float) -> None:
    weights = weights_of(logits)
    kept = keep_top_p(weights, mass)
    assert list(kept) == list(range(len(kept)))
    assert len(kept) >= 1
    total = np.cumsum(weights)[-1]
    assert np.cumsum(weights)[len(kept) - 1] >= mass * total
    if len(kept) > 1:
        assert np.cumsum(weights)[len(kept) - 2] < mass * total


@given(logit_rows, shares)
def test_min_p_keeps_exactly_those_above_the_share(logits: Float32, share: float) -> None:
    weights = weights_of(logits)
    kept = set(keep_min_p(weights, share).tolist())
    assert kept == {i for i, weight in enumerate(weights) if weight / weights[0] >= share}


@given(logit_rows, shares)
def test_typical_keeps_the_mass_nearest_to_the_entropy(logits: Float32, mass: float) -> None:
    weights = weights_of(logits)
    p = weights / weights.sum()
    kept = keep_typical(weights, np.log(weights), mass)
    assert list(kept) == sorted(set(kept.tolist()))
    assert p[kept].sum() >= mass - 1e-9
    distance = np.abs(-np.log(p) + np.sum(p * np.log(p)))
    left_out = np.setdiff1d(np.arange(len(p)), kept)
    if len(left_out):
        assert distance[kept].max() <= distance[left_out].min() + 1e-9


def test_typical_may_drop_the_most_probable() -> None:
    weights = np.array([0.4, *([0.03] * 20)])
    assert 0 not in keep_typical(weights, np.log(weights), 0.3)


def test_values_that_mean_off_keep_everything() -> None:
    weights = weights_of(np.array([3.0, -80.0, 1.0], np.float32))
    for kept in (
        keep_top_k(np.arange(3), 0),
        keep_top_p(weights, 1.0),
        keep_min_p(weights, 0.0),
        keep_typical(weights, np.log(weights), 1.0),
    ):
        assert list(kept) == [0, 1, 2]


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    logits = np.array([2.0, -2.0, 0.0, 2.0], np.float32)
    assert list(penalise_repetition(logits, ids(0, 1, 2), 2.0)) == [1.0, -4.0, 0.0, 2.0]


def test_frequency_counts_and_presence_counts_once_and_not_the_prompt() -> None:
    logits = np.zeros(3, np.float32)
    changed = penalise_counts(logits, ids(0, 1), ids(3, 0), frequency=0.5, presence=0.25)
    assert list(changed) == [-1.75, 0.0, 0.0]


def test_the_caller_s_logits_are_left_alone() -> None:
    logits = np.array([1.0, 2.0], np.float32)
    row = RowSampling(
        bias_ids=ids(0),
        bias_values=np.array([5], np.float32),
        seen_ids=ids(1),
        seen_counts=ids(1),
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    assert list(apply_penalties(logits, row)) == [6.0, 0.0]
    assert list(logits) == [1.0, 2.0]


def test_greedy_takes_the_lower_id_of_equals_after_bias() -> None:
    logits = np.array([0.0, 4.0, 4.0], np.float32)
    assert choose(logits, RowSampling()) == 1
    assert choose(logits, RowSampling(bias_ids=ids(0), bias_values=np.array([9], np.float32))) == 0


def test_equal_logits_are_ordered_by_id() -> None:
    kept, _ = candidates(np.array([1, 2, 2, 1, 2], np.float32), RowSampling(temperature=1.0))
    assert list(kept) == [1, 2, 4, 0, 3]


@given(logit_rows, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_a_choice_depends_on_its_counter_only(logits: Float32, seed: int, position: int) -> None:
    row = RowSampling(temperature=0.8, top_k=5, top_p=0.9, seed=seed, position=position)
    token = choose(logits, row)
    assert token == choose(logits.copy(), row)
    assert token in candidates(logits / np.float32(0.8), row)[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0], np.float32)
    num_draws = 4000
    drawn = Counter(choose(logits, RowSampling(temperature=temperature, seed=3, position=i)) for i in range(num_draws))
    expected = np.exp(logits / temperature)
    expected /= expected.sum()
    for token, p in enumerate(expected):
        assert abs(drawn[token] / num_draws - p) < 5 * np.sqrt(p * (1 - p) / num_draws)


def test_choices_of_one_request_differ() -> None:
    logits = np.zeros(100, np.float32)
    assert len({choose(logits, RowSampling(temperature=1.0, choice=i)) for i in range(8)}) > 4


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = np.array([0.0, 10.0, 9.99], np.float32)
    for temperature in (1e-4, 1e-30, 1e-40, 1e-60):
        assert choose(logits, RowSampling(temperature=temperature, seed=5)) == 1


@given(logit_rows, shares)
def test_xtc_keeps_the_least_probable_of_those_above_the_threshold_and_all_below(logits: Float32, share: float) -> None:
    weights = weights_of(logits)
    p = weights / np.cumsum(weights)[-1]
    kept = drop_top_choices(weights, share)
    num_above = int((weights >= share * np.cumsum(weights)[-1]).sum())
    assert list(kept) == list(range(max(num_above - 1, 0), len(p)))


def test_xtc_leaves_a_single_probable_token_alone() -> None:
    weights = np.array([0.9, 0.05, 0.05])
    assert list(drop_top_choices(weights, 0.5)) == [0, 1, 2]
    assert list(drop_top_choices(weights, 0.05)) == [2]


def test_xtc_comes_after_min_p_and_counts_what_that_kept() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    row = RowSampling(temperature=1.0, min_p=0.6, xtc_probability=1.0, xtc_threshold=0.4)
    assert list(candidates(logits, row)[0]) == [1]  # of 4/7 and 3/7 the second stays
    assert list(candidates(logits, RowSampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.35))[0]) == [
        0,
        1,
        2,
        3,
    ]


def test_xtc_strikes_as_often_as_asked_and_not_by_the_draw_of_the_token() -> None:
    rows = [RowSampling(seed=3, position=i, xtc_probability=0.3) for i in range(4000)]
    struck = [applies_xtc(row) for row in rows]
    assert abs(np.mean(struck) - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 4000)
    draws = np.array([uniform(3, i, 0) for i in range(4000)])
    assert abs(np.mean(draws[struck]) - 0.5) < 0.05  # else the token's draws would lie below 0.3
    assert not any(applies_xtc(row.at(i, xtc_probability=0.0)) for i, row in enumerate(rows))


def test_greedy_ignores_xtc() -> None:
    assert choose(np.array([1, 2], np.float32), RowSampling(xtc_probability=1.0, xtc_threshold=0.0)) == 1


def test_a_row_moved_to_a_position_keeps_everything_else() -> None:
    row = RowSampling(temperature=0.5, top_k=3, seed=9, bias_ids=ids(1), bias_values=np.ones(1, np.float32))
    moved = row.at(7, seen_ids=ids(2))
    changed = {"position": 7, "seen_ids": ids(2)}
    for field in fields(RowSampling):
        np.testing.assert_array_equal(getattr(moved, field.name), changed.get(field.name, getattr(row, field.name)))
    assert row.position == 0
