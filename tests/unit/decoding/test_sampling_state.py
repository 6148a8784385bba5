"""What sampling a token depends on: defaults, biases before min_tokens, token counts."""

from __future__ import annotations

from kvarn.backends.batch import RowSampling
from kvarn.decoding.sampling_state import BANNED, SamplingDefaults, SamplingState
from kvarn.types import SamplingParams
from tests.submitting import new_request


def row(params: SamplingParams, defaults: SamplingDefaults | None = None, output: tuple[int, ...] = ()) -> RowSampling:
    request = new_request("r1", (5, 6, 5), params, max_total_tokens=100, seed=params.seed or 0)
    state = SamplingState(request, defaults or SamplingDefaults(), eos_ids=(2,))
    for token_id in output:
        state.row(request, len(request.token_ids))
        request.append(token_id)
    return state.row(request, len(request.token_ids))


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


def test_a_penalty_window_forgets_what_lies_before_it() -> None:
    params = SamplingParams(repetition_penalty=1.2, penalty_window=3)
    chosen = row(params, output=(8, 9))
    assert dict(zip(chosen.seen_ids.tolist(), chosen.seen_counts.tolist(), strict=True)) == {5: 0, 8: 1, 9: 1}


def test_dry_penalties_join_the_callers_bias() -> None:
    params = SamplingParams(dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=1, logit_bias={6: 1.0, 9: 2.0})
    chosen = row(params, output=(6, 5))  # 5 6 5 6 5: after 6 5 came 6
    assert chosen.bias_ids.tolist() == [6, 9, 6]
    assert chosen.bias_values.tolist() == [1.0, 2.0, -0.5 * 2.0**2]


def test_a_breaker_of_tokens_ends_dry_runs() -> None:
    params = SamplingParams(dry_multiplier=0.5, dry_allowed_length=1)
    request = new_request("r1", (5, 6, 7, 5, 6), params, max_total_tokens=100, seed=0)
    assert SamplingState(request, SamplingDefaults(), (2,)).row(request, len(request.token_ids)).bias_ids.tolist() == [
        7
    ]
    assert (
        SamplingState(request, SamplingDefaults(), (2,), ((6,),)).row(request, len(request.token_ids)).bias_ids.tolist()
        == []
    )


def test_xtc_and_the_index_of_the_choice_are_passed_on() -> None:
    params = SamplingParams(xtc_probability=0.25, xtc_threshold=0.2)
    request = new_request("r1", (5,), params, max_total_tokens=100, seed=0, choice=3)
    chosen = SamplingState(request, SamplingDefaults(), (2,)).row(request, len(request.token_ids))
    assert (chosen.xtc_probability, chosen.xtc_threshold, chosen.choice) == (0.25, 0.2, 3)
