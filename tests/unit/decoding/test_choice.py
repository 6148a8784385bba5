"""What a choice depends on: defaults, biases before min_tokens, counts of tokens seen."""

from __future__ import annotations

from kvarn.backends.batch import RowSampling
from kvarn.decoding.choice import BANNED, Choice, SamplingDefaults
from kvarn.request import Request
from kvarn.types import SamplingParams


def row(params: SamplingParams, defaults: SamplingDefaults | None = None, output: tuple[int, ...] = ()) -> RowSampling:
    request = Request("r1", (5, 6, 5), params, max_total_tokens=100, seed=params.seed or 0)
    choice = Choice(request, defaults or SamplingDefaults(), eos_ids=(2,))
    for token_id in output:
        choice.row(request)
        request.append(token_id)
    return choice.row(request)


def test_what_the_caller_leaves_open_is_filled_in() -> None:
    chosen = row(SamplingParams())
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p) == (0.7, 0.95, 0, 0.0)


def test_the_models_recommendation_comes_before_our_defaults() -> None:
    chosen = row(SamplingParams(top_k=3), SamplingDefaults(temperature=0.2, top_k=40, repetition_penalty=1.1))
    assert (chosen.temperature, chosen.top_k, chosen.repetition_penalty) == (0.2, 3, 1.1)


def test_zero_is_a_value_and_not_a_gap() -> None:
    chosen = row(SamplingParams(temperature=0.0, top_k=0), SamplingDefaults(temperature=0.2, top_k=40))
    assert (chosen.temperature, chosen.top_k) == (0.0, 0)


def test_stops_are_banned_until_min_tokens_and_the_callers_bias_stays() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=(9,), logit_bias={4: 1.5})
    early, late = row(params), row(params, output=(7,))
    assert dict(zip(early.bias_ids.tolist(), early.bias_values.tolist(), strict=True)) == {2: BANNED, 4: 1.5, 9: BANNED}
    assert dict(zip(late.bias_ids.tolist(), late.bias_values.tolist(), strict=True)) == {4: 1.5}


def test_an_ignored_end_is_not_banned() -> None:
    assert row(SamplingParams(min_tokens=1, ignore_eos=True)).bias_ids.tolist() == []


def test_penalties_see_prompt_and_answer_but_count_the_answer_only() -> None:
    chosen = row(SamplingParams(frequency_penalty=0.5), output=(6, 8, 8))
    assert dict(zip(chosen.seen_ids.tolist(), chosen.seen_counts.tolist(), strict=True)) == {5: 0, 6: 1, 8: 2}


def test_without_penalties_nothing_is_counted() -> None:
    assert row(SamplingParams(), output=(6,)).seen_ids.tolist() == []


def test_the_position_is_that_of_the_token_being_chosen() -> None:
    assert row(SamplingParams(), output=(6,)).position == 4


def test_a_negative_seed_becomes_an_unsigned_key() -> None:
    assert row(SamplingParams(seed=-1)).seed == 2**64 - 1
