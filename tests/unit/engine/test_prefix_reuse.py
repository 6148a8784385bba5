"""What requests share: cached prefixes, one prompt for n choices; and scores of the prompt itself."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.backends.fake import FakeBackend
from kvarn.engine.embed_score import score_tokens
from kvarn.engine.engine import Engine
from kvarn.request import Request, RequestState
from kvarn.types import FinishReason, SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import complete, completion_of, expected, is_idle, make_engine, run_to_end

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=50.0, max_tokens=12, ignore_eos=True, seed=3)
PREFIX = list(range(1, 41))  # ten blocks


def num_computed(engine: Engine) -> int:
    backend = engine.backend
    assert isinstance(backend, FakeBackend)
    return sum(backend.batch_sizes)


def test_a_second_prompt_computes_only_what_follows_the_shared_prefix() -> None:
    engine = make_engine()
    complete(engine, [*PREFIX, 50], GREEDY.replace(max_tokens=1))
    before = num_computed(engine)
    completion = complete(engine, [*PREFIX, 60], GREEDY)
    assert list(completion.token_ids) == expected([*PREFIX, 60], 20)
    assert completion.usage.cached_tokens == 40
    assert num_computed(engine) - before == 1 + len(completion.token_ids) - 1
    assert engine.stats().prefix_hit_tokens == 40


@pytest.mark.parametrize("how", ["reuse_cache", "prefix_cache", "tenant", "prompt_logprobs", "publishes"])
def test_nothing_is_taken_from_the_cache_when_it_must_not_be(how: str) -> None:
    engine = make_engine(prefix_cache=how != "prefix_cache")
    if how == "publishes":  # a model that reads both ways
        old = engine
        engine = Engine(
            old.backend,
            old.decoder,
            old.kv,
            stream=old.stream,
            admission=old.admission,
            config=old.config,
            publishes=False,
        )
    complete(engine, [*PREFIX, 50], GREEDY)
    params = {"reuse_cache": {"reuse_cache": False}, "prompt_logprobs": {"prompt_logprobs": 0}}.get(how, {})
    request = submit(engine, [*PREFIX, 60], GREEDY.replace(**params), tenant="other" if how == "tenant" else "")
    completion = completion_of(run_to_end(engine), request)
    assert completion.usage.cached_tokens == 0
    assert list(completion.token_ids) == expected([*PREFIX, 60], 20)


def test_a_request_that_frees_its_cache_leaves_nothing_to_find() -> None:
    engine = make_engine()
    complete(engine, PREFIX, GREEDY.replace(free_cache_on_finish=True))
    assert engine.kv.stats().cached == 0
    assert complete(engine, PREFIX, GREEDY).usage.cached_tokens == 0
    assert complete(engine, PREFIX, GREEDY).usage.cached_tokens > 0


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_kept_prompt_outlives_a_flood_of_40_others(is_kept: bool) -> None:
    engine = make_engine(num_blocks=64)
    primed = GREEDY.replace(prefill_only=True, keep_cache=is_kept)
    complete(engine, [*PREFIX, 50], primed)
    for number in range(40):
        flood = [100 + number, *PREFIX]
        assert complete(engine, flood, GREEDY.replace(max_tokens=4)).usage.cached_tokens == 0
        engine.kv.check()
    assert complete(engine, [*PREFIX, 50], GREEDY).usage.cached_tokens == (40 if is_kept else 0)


def test_kept_prompts_leave_every_request_the_whole_cache() -> None:
    engine = make_engine(num_blocks=40)
    for number in range(20):
        complete(engine, [100 + number, *PREFIX], GREEDY.replace(prefill_only=True, keep_cache=True))
    assert engine.kv.groups[0].pool.num_kept == 10
    prompt = [n % 90 + 1 for n in range(150)]  # 38 of the 40 blocks
    assert list(complete(engine, prompt, GREEDY.replace(max_tokens=2)).token_ids) == expected(prompt, 2)
    engine.kv.check()


def test_requests_with_one_prefix_that_come_together_hold_and_compute_it_once() -> None:
    engine = make_engine(num_blocks=100, max_batch_tokens=32)
    params = GREEDY.replace(max_tokens=20, ignore_eos=True)
    requests = [submit(engine, [*PREFIX, n], params) for n in range(50, 66)]
    while engine.scheduler.num_waiting:
        engine.step()
    assert all(request.state is RequestState.RUNNING for request in requests)
    assert engine.kv.stats().used <= 10 + 16 * 5
    run_to_end(engine)
    assert num_computed(engine) == 40 + 16 * 20
    assert is_idle(engine)


def test_prefill_only_computes_and_publishes_the_prompt_and_says_nothing() -> None:
    engine = make_engine()
    completion = complete(engine, [*PREFIX, 9], GREEDY.replace(prefill_only=True))
    assert (completion.token_ids, completion.text) == ((), "")
    assert completion.finish_reason is FinishReason.LENGTH
    assert complete(engine, [*PREFIX, 9], GREEDY).usage.cached_tokens == 40


def submit_choices(engine: Engine, prompt: list[int], params: SamplingParams) -> list[Request]:
    first = submit(engine, prompt, params)
    return [first, *(submit(engine, prompt, params, choice=i, fork_of=first) for i in range(1, params.n))]


def alone(prompt: list[int], params: SamplingParams, choice: int) -> tuple[int, ...]:
    engine = make_engine(max_batch_tokens=100)
    request = submit(engine, prompt, params.replace(n=1), choice=choice)
    return completion_of(run_to_end(engine), request).token_ids


@pytest.mark.parametrize("prompt", [[5], PREFIX[:8], PREFIX[:10], PREFIX], ids=len)
def test_choices_share_one_prompt_and_each_says_what_it_would_say_alone(prompt: list[int]) -> None:
    engine = make_engine()
    requests = submit_choices(engine, prompt, SEEDED.replace(n=4))
    events = run_to_end(engine)
    answers = [completion_of(events, request).token_ids for request in requests]
    assert answers == [alone(prompt, SEEDED, choice) for choice in range(4)]
    assert len(set(answers)) == 4
    assert num_computed(engine) <= len(prompt) + 3 + 4 * 11
    assert {event.choice for event in events} == {0, 1, 2, 3}
    assert is_idle(engine)


def test_choices_of_a_request_without_a_seed_share_the_one_that_is_drawn() -> None:
    requests = submit_choices(make_engine(), PREFIX, SEEDED.replace(seed=None, n=3))
    assert len({request.seed for request in requests}) == 1


def test_choices_run_one_after_the_other_where_only_one_may_run() -> None:
    engine = make_engine(max_running=1)
    requests = submit_choices(engine, PREFIX, SEEDED.replace(n=3))
    events = run_to_end(engine)
    answers = [completion_of(events, request).token_ids for request in requests]
    assert answers == [alone(PREFIX, SEEDED, choice) for choice in range(3)]


def test_the_choices_of_a_cancelled_first_one_go_on() -> None:
    engine = make_engine()
    requests = submit_choices(engine, PREFIX, SEEDED.replace(n=3))
    engine.step()
    requests[0].is_cancel_requested = True
    events = run_to_end(engine)
    for choice in (1, 2):
        assert completion_of(events, requests[choice]).token_ids == alone(PREFIX, SEEDED, choice)
    assert num_computed(engine) <= 16 + len(PREFIX) + 1 + 2 * 12
    assert is_idle(engine)


@pytest.mark.parametrize("max_batch_tokens", [3, 16, 100])
def test_prompt_logprobs_are_those_of_scoring_the_prompt(max_batch_tokens: int) -> None:
    engine = make_engine(max_batch_tokens=max_batch_tokens)
    neighbour = submit(engine, [7], GREEDY)
    request = submit(engine, PREFIX, GREEDY.replace(prompt_logprobs=2))
    events = run_to_end(engine)
    completion = completion_of(events, request)
    assert completion.prompt_logprobs is not None
    assert [entry.token_id for entry in completion.prompt_logprobs] == PREFIX[1:]
    scores = score_tokens(engine.backend, engine.kv, PREFIX, 100)
    np.testing.assert_array_equal([entry.logprob for entry in completion.prompt_logprobs], scores)
    assert {len(entry.top) for entry in completion.prompt_logprobs} == {2}
    assert list(completion.token_ids) == expected(PREFIX, 20)
    assert completion_of(events, neighbour).prompt_logprobs is None
    assert list(neighbour.output_ids) == expected([7], 20)


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_prompt_logprobs_survive_preemption(num_steps: int) -> None:
    engine = make_engine()
    request = submit(engine, PREFIX, GREEDY.replace(prompt_logprobs=1))
    for _ in range(num_steps):
        engine.step()
    engine.scheduler.preempt(request)
    run_to_end(engine)
    whole = complete(make_engine(), PREFIX, GREEDY.replace(prompt_logprobs=1))
    assert tuple(request.prompt_logprobs) == whole.prompt_logprobs
    assert request.output_ids == whole.token_ids


def test_prefill_only_with_prompt_logprobs_scores_the_prompt() -> None:
    completion = complete(make_engine(), PREFIX, GREEDY.replace(prefill_only=True, prompt_logprobs=0))
    assert completion.token_ids == ()
    assert [entry.token_id for entry in completion.prompt_logprobs or ()] == PREFIX[1:]


def test_a_prompt_whose_scores_are_no_numbers_fails() -> None:
    engine = make_engine(faults={0: "nan"})
    request = submit(engine, PREFIX, GREEDY.replace(prompt_logprobs=0))
    assert completion_of(run_to_end(engine), request).finish_reason is FinishReason.FAILED
    assert is_idle(engine)


def test_no_choice_is_forked_from_a_request_whose_copy_is_still_to_be_made() -> None:
    """The copy would be lost with its request, were that preempted in the same plan."""
    engine = make_engine(num_blocks=40)
    leader = submit(engine, PREFIX[:6], SEEDED.replace(n=2))
    engine.step()
    engine.scheduler._kv.fork("reader", leader.id)  # the last block is partial and shared from now on
    scheduler = engine.scheduler
    plan = scheduler.plan()
    (entry,) = plan.entries
    assert entry.copies
    assert not scheduler._starter._can_fork({leader.id: entry}, leader)
    assert scheduler._starter._can_fork({}, leader)


def test_what_a_failed_request_computed_is_not_found_by_others() -> None:
    engine = make_engine(poison={200: RuntimeError("broken")})
    failed = submit(engine, [*PREFIX, 200], GREEDY)
    run_to_end(engine)
    assert failed.state is RequestState.FAILED
    assert engine.kv.stats().cached == 0
    assert complete(engine, [*PREFIX, 50], GREEDY).usage.cached_tokens == 0
