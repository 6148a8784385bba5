"""Engine.step over FakeBackend: chunks, batches, ends, and no block ever lost."""

from __future__ import annotations

import random

import pytest

from kvarn.errors import InvalidParameter, PromptTooLong
from kvarn.types import FinishReason, SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import (
    EOS,
    VOCAB,
    complete,
    completion_of,
    expected,
    is_idle,
    make_engine,
    run_to_end,
    saying,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PROMPT = list(range(1, 60))


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 16, 100])
def test_greedy_output_does_not_depend_on_prompt_chunks(max_batch_tokens: int) -> None:
    engine = make_engine(max_batch_tokens=max_batch_tokens)
    assert list(complete(engine, PROMPT, GREEDY).token_ids) == expected(PROMPT, 20)
    assert max(engine.backend.batch_sizes) <= max_batch_tokens  # type: ignore[attr-defined]
    assert is_idle(engine)


def test_requests_that_share_steps_get_what_they_would_get_alone() -> None:
    engine, rng = make_engine(num_blocks=200), random.Random(5)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(12)]
    requests = [submit(engine, prompt, GREEDY) for prompt in prompts]
    events = run_to_end(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert list(completion_of(events, request).token_ids) == expected(prompt, 20)
    assert is_idle(engine)


def test_the_end_token_ends_an_answer_and_has_no_text() -> None:
    completion = complete(make_engine(saying("hi", "ab")), "ab", GREEDY)
    assert (completion.text, completion.finish_reason, completion.stop_match) == ("hi", FinishReason.STOP, EOS)
    assert completion.token_ids == (*b"hi", EOS)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 3)


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    completion = complete(make_engine(saying("hi", "ab")), "ab", GREEDY.replace(ignore_eos=True, max_tokens=5))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.token_ids == (*b"hi", EOS, EOS, EOS)


def test_max_tokens_ends_with_length() -> None:
    completion = complete(make_engine(saying("hello", "ab")), "ab", GREEDY.replace(max_tokens=3))
    assert (completion.text, completion.finish_reason) == ("hel", FinishReason.LENGTH)


def test_the_end_of_the_context_ends_with_length() -> None:
    completion = complete(make_engine(saying("x" * 50, "abcdef"), context=10), "abcdef", GREEDY)
    assert (completion.text, completion.finish_reason) == ("xxxx", FinishReason.LENGTH)


def test_a_stop_token_id_ends_without_its_text() -> None:
    completion = complete(make_engine(saying("hello", "ab")), "ab", GREEDY.replace(stop_token_ids=(ord("l"),)))
    assert (completion.text, completion.stop_match) == ("he", ord("l"))
    assert completion.finish_reason is FinishReason.STOP


def test_min_tokens_bans_the_end_until_it_is_reached() -> None:
    completion = complete(make_engine(lambda tokens: EOS), "ab", GREEDY.replace(min_tokens=4, max_tokens=10))
    assert completion.finish_reason is FinishReason.STOP
    assert EOS not in completion.token_ids[:-1]
    assert len(completion.token_ids) == 5


def test_min_tokens_lets_stop_text_pass() -> None:
    params = GREEDY.replace(min_tokens=4, stop="l")
    completion = complete(make_engine(saying("lollipop", "ab")), "ab", params)
    assert (completion.text, completion.stop_match) == ("lollipop", EOS)


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers() -> None:
    engine = make_engine(context=10)
    with pytest.raises(PromptTooLong) as caught:
        submit(engine, [1] * 10, GREEDY)
    assert (caught.value.num_tokens, caught.value.limit) == (10, 9)
    assert is_idle(engine)


@pytest.mark.parametrize("bad", [[-1], [VOCAB], [2**31], []])
def test_token_ids_outside_the_vocabulary_are_refused(bad: list[int]) -> None:
    with pytest.raises(InvalidParameter):
        submit(make_engine(), bad, GREEDY)


@pytest.mark.parametrize("params", [{"logit_bias": {VOCAB: 1.0}}, {"stop_token_ids": (VOCAB,)}])
def test_parameters_that_name_unknown_tokens_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter, match="outside the vocabulary"):
        submit(make_engine(), [1], GREEDY.replace(**params))


def test_logit_bias_reaches_the_choice() -> None:
    completion = complete(make_engine(lambda _: 7), "ab", GREEDY.replace(logit_bias={9: 50.0}, max_tokens=2))
    assert completion.token_ids == (9, 9)


def test_logprobs_name_the_chosen_token_and_the_most_probable_ones() -> None:
    completion = complete(make_engine(lambda _: 7), "ab", GREEDY.replace(logprobs=3, max_tokens=2))
    assert completion.logprobs is not None
    first = completion.logprobs[0]
    assert first.token_id == 7
    assert first.top[0] == (7, first.logprob)
    assert len(first.top) == 3
    assert len(completion.logprobs) == 2


def test_logprobs_of_one_request_do_not_leak_into_its_neighbour() -> None:
    engine = make_engine()
    with_them, without = submit(engine, [1], GREEDY.replace(logprobs=5)), submit(engine, [2], GREEDY)
    zero = submit(engine, [3], GREEDY.replace(logprobs=0))
    events = run_to_end(engine)
    assert completion_of(events, without).logprobs is None
    assert {len(entry.top) for entry in completion_of(events, zero).logprobs or ()} == {0}
    assert {len(entry.top) for entry in completion_of(events, with_them).logprobs or ()} == {5}


def test_the_same_seed_gives_the_same_answer_and_another_seed_another() -> None:
    params = SamplingParams(temperature=50.0, max_tokens=20, ignore_eos=True, seed=3)
    answers = [complete(make_engine(), PROMPT, p).token_ids for p in (params, params, params.replace(seed=4))]
    assert answers[0] == answers[1] != answers[2]


def test_a_seed_is_drawn_and_reported_when_none_is_given() -> None:
    params = SamplingParams(temperature=50.0, max_tokens=20, ignore_eos=True)
    drawn = complete(make_engine(), PROMPT, params)
    assert 0 <= drawn.seed < 2**63
    assert complete(make_engine(), PROMPT, params.replace(seed=drawn.seed)).token_ids == drawn.token_ids


def test_a_negative_seed_is_accepted_and_reported_as_given() -> None:
    assert complete(make_engine(), PROMPT, GREEDY.replace(seed=-5)).seed == -5


def test_an_interrupted_step_is_as_if_it_had_not_begun() -> None:
    engine = make_engine(faults={2: KeyboardInterrupt(), 6: KeyboardInterrupt()})
    request = submit(engine, PROMPT, GREEDY)
    events = []
    while engine.has_work:
        try:
            events += engine.step()
        except KeyboardInterrupt:
            assert engine.kv.num_tokens(request.id) == request.num_computed
        engine.kv.check()
    assert list(completion_of(events, request).token_ids) == expected(PROMPT, 20)


def test_an_interrupted_step_keeps_the_last_words_of_a_cancelled_request() -> None:
    engine = make_engine(faults={1: KeyboardInterrupt()})
    cancelled, other = submit(engine, PROMPT, GREEDY), submit(engine, [7], GREEDY)
    engine.step()
    cancelled.is_cancel_requested = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert completion_of(run_to_end(engine), cancelled).finish_reason is FinishReason.CANCELLED
    assert list(other.output_ids) == expected([7], 20)


def test_timings_add_up() -> None:
    completion = complete(make_engine(), PROMPT, GREEDY)
    timings = completion.timings
    assert timings.first_token_s == pytest.approx(timings.queue_s + timings.prefill_s)
    assert timings.decode_s > 0
    assert timings.tokens_per_s(len(completion.token_ids)) > 0
