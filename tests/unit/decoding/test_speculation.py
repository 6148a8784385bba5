"""Where drafts come from, how often they are right, and how many of them a step computes."""

from __future__ import annotations

import random
import time

import pytest

from kvarn import ConfigError, SamplingParams
from kvarn.config import AUTO_SPECULATION, EngineConfig, speculation_methods
from kvarn.decoding.speculation.acceptance import AcceptanceRates
from kvarn.decoding.speculation.draft_length import ByCost, RowCosts
from kvarn.decoding.speculation.drafters import EarlierAnswers, PredictedAnswer, PromptLookup, Proposal
from kvarn.decoding.speculation.suffix_index import MAX_MATCH, SEPARATOR, SuffixIndex
from kvarn.decoding.speculation.tenant_texts import TenantRegistry
from kvarn.request import Request
from tests.submitting import new_request


def request_of(*token_ids: int, tenant: str = "") -> Request:
    return new_request("r", token_ids, SamplingParams(), 1000, 0, tenant=tenant)


@pytest.mark.parametrize("is_appended", [False, True])
def test_the_longest_repetition_is_found_as_by_comparing_everything(is_appended: bool) -> None:
    rng = random.Random(1)
    for _ in range(200):
        text = rng.choices(range(4), k=rng.randint(0, 60))
        end = rng.choices(range(4), k=rng.randint(1, 12))
        index = SuffixIndex([] if is_appended else text)
        for token_id in text if is_appended else ():
            index.append(token_id)
        found = index.find(end)
        runs = [run_at(text, last, end) for last in range(len(text))]
        if found is None:
            assert max(runs, default=0) < 2
        else:
            assert found.length == runs[found.at - 1] >= 2


def run_at(text: list[int], last: int, end: list[int]) -> int:
    most = min(last + 1, len(end))
    return next((k for k in range(most) if text[last - k] != end[-1 - k]), most)


def test_what_follows_ends_with_its_text_and_a_period_goes_on() -> None:
    index = SuffixIndex([1, 2, 3, SEPARATOR, 7, 8, 9])
    assert index.following(1, 9) == [2, 3]
    assert index.following(5, 5) == [8, 9, 8, 9, 8]
    assert index.following(7, 5) == []


def test_the_older_half_of_a_full_index_is_forgotten() -> None:
    index = SuffixIndex(max_tokens=100)
    for token_id in range(1000):
        index.append(token_id)
    assert len(index.token_ids) <= 100
    assert index.find([998, 999]) is not None
    assert index.find([10, 11]) is None
    assert index.num_bytes < 100 * 40


def test_a_prompt_is_looked_up_and_the_answer_too() -> None:
    request, lookup = request_of(5, 6, 7, 8, 9, 1, 5, 6, 7), PromptLookup()
    assert lookup.propose(request, 2) == Proposal("ngram", [8, 9], 3)
    request.token_ids += [8, 9]
    assert lookup.propose(request, 2) == Proposal("ngram", [1, 5], 5)
    request.token_ids += [2, 8]
    assert lookup.propose(request, 2) is None
    request.token_ids += [9]
    assert lookup.propose(request, 1) == Proposal("ngram", [2], 2)  # the newest of those as long


def test_a_text_that_repeats_nothing_has_no_proposal() -> None:
    assert PromptLookup().propose(request_of(1, 2, 3, 4), 4) is None


def test_a_prediction_is_followed_from_its_start_and_found_again_behind_an_edit() -> None:
    request, drafter = request_of(90, 91), PredictedAnswer([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert drafter.propose(request, 3) == Proposal("prediction", [1, 2, 3], 0)
    request.token_ids += [1, 2, 50]  # 50 is not in it
    assert drafter.propose(request, 3) is None
    request.token_ids += [4]
    assert drafter.propose(request, 3) == Proposal("prediction", [5, 6, 7], 1)
    request.token_ids += [5, 6, 7, 8]
    assert drafter.propose(request, 3) is None


def test_earlier_answers_are_found_by_their_tenant_alone() -> None:
    tenants = TenantRegistry(keeps_answers=True)
    told = request_of(1, 2, 3, 4, tenant="a")
    told.token_ids += [10, 11, 12, 13]
    tenants.add(told)
    for tenant, expected in {"a": Proposal("suffix", [10, 11], 4), "b": None, "": None}.items():
        answers = tenants.of(tenant).answers
        assert answers is not None
        assert EarlierAnswers(answers).propose(request_of(1, 2, 3, 4, tenant=tenant), 2) == expected


def test_answers_take_a_bounded_number_of_bytes_whoever_asks() -> None:
    tenants = TenantRegistry(keeps_answers=True, max_bytes=100_000)
    for number in range(60):
        request = request_of(1, tenant=str(number))
        request.token_ids += range(2_000)
        tenants.add(request)
        assert tenants.num_bytes <= 100_000


def test_rates_are_learned_by_length_of_match_and_from_the_tenant() -> None:
    tenant = AcceptanceRates()
    first = AcceptanceRates(tenant)
    for _ in range(40):
        first.observe("ngram", 2, is_right=False)
        first.observe("ngram", 20, is_right=True)
    assert first.rate("ngram", 2) < 0.1
    assert first.rate("ngram", 25) > 0.9
    assert AcceptanceRates(tenant).rate("ngram", 2) < 0.2
    assert AcceptanceRates().rate("ngram", 2) == 0.5


def measured(seconds: dict[int, float], max_stretch: float = 10.0) -> ByCost:
    chooser = ByCost(max_stretch)
    for num_rows, step_s in seconds.items():
        chooser.observe(num_rows, step_s)
    return chooser


VNNI = {1: 1.0, 2: 1.25, 4: 1.42, 8: 1.70, 16: 3.03}  # relative times of steps, as measured


@pytest.mark.parametrize(("rate", "expected"), [(0.05, {0}), (0.6, {3, 4}), (0.9, set(range(7, 10))), (0.2, {0})])
def test_so_many_drafts_are_computed_as_give_most_tokens_a_second(rate: float, expected: set[int]) -> None:
    gains = [rate**position for position in range(1, 16)]
    assert measured(VNNI).num_rows(1, gains) in expected


def test_nothing_is_drafted_before_a_plain_step_was_measured_or_where_rows_cost_as_much_as_steps() -> None:
    assert measured({2: 1.0}).num_rows(1, [1.0]) == 0
    assert measured({1: 1.0, 2: 2.0, 4: 4.0, 16: 16.0}).num_rows(1, [0.9] * 15) == 0
    assert not measured({16: 16.0, 17: 17.0, 31: 31.0}).may_pay(16, 15)


def test_a_step_with_drafts_stays_within_the_stretch_of_one_without() -> None:
    assert measured(VNNI, max_stretch=1.5).num_rows(1, [1.0] * 15) <= 6
    assert measured(VNNI, max_stretch=1.0).num_rows(1, [1.0] * 15) == 0


def test_what_was_measured_long_ago_is_measured_again() -> None:
    costs = RowCosts()
    costs.observe(1, 1.0)
    costs.observe(8, 9.0)
    for _ in range(200):
        costs.observe(4, 2.0)
    assert costs.seconds(1, 4) is None
    assert costs.seconds(4, 8) == pytest.approx([2.0, 2.12, 2.24, 2.36, 2.48])


def test_a_number_of_rows_that_was_disturbed_counts_no_more_than_a_larger_one() -> None:
    costs = RowCosts()
    for num_rows, step_s in {1: 1.0, 2: 5.0, 4: 1.5}.items():
        costs.observe(num_rows, step_s)
    assert costs.seconds(1, 4) == pytest.approx([1.0, 1.5, 1.5, 1.5])


def test_looking_up_in_long_texts_is_quick() -> None:
    rng = random.Random(0)
    request, lookup = request_of(*rng.choices(range(50), k=32_000)), PromptLookup()
    lookup.propose(request, 15)
    started = time.process_time()
    for _ in range(500):
        request.token_ids.append(rng.randrange(50))
        lookup.propose(request, 15)
    assert (time.process_time() - started) / 500 < 1e-3  # measured: 20 us
    assert MAX_MATCH == 32


@pytest.mark.parametrize("setting", ["", "on", "auto,", "off,auto", "ngram,guess", 3, None, "AUTO"])
def test_a_setting_that_is_none_is_refused_by_name(setting: object) -> None:
    with pytest.raises(ConfigError, match=r"speculation is .*choose one of"):
        EngineConfig(speculation=setting)  # type: ignore[arg-type]


def test_a_setting_names_methods() -> None:
    assert speculation_methods("off") == frozenset()
    assert speculation_methods("auto") == AUTO_SPECULATION
    assert speculation_methods("auto,suffix") == AUTO_SPECULATION | {"suffix"}
    assert speculation_methods("ngram") == {"ngram"}
