"""What is refused for ever, what is refused for now, and what is cut only when asked."""

from __future__ import annotations

import pytest

from kvarn.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.scheduling.rate_limit import ExpectedAnswer, MovingWindow
from kvarn.engine.submission import Submission
from kvarn.errors import CapacityError, InvalidParameter, PromptTooLong
from kvarn.request import Request
from kvarn.types import FinishReason, SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import SimulatedClock, complete, expected, is_idle, make_engine, run_to_end

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptTooLong) as caught:
        submit(make_engine(num_blocks=3), [1] * 12, GREEDY)  # 3 blocks of 4 tokens
    assert (caught.value.num_tokens, caught.value.limit) == (12, 11)


def test_answers_that_together_exceed_the_cache_are_refused_with_the_numbers() -> None:
    engine = make_engine(num_blocks=20)
    with pytest.raises(InvalidParameter, match=r"10 answers of up to 20 tokens to a prompt of 2 need 202 .* holds 80"):
        submit(engine, [1, 2], GREEDY.replace(n=10))
    assert is_idle(engine)


def test_open_ended_answers_share_what_the_cache_holds() -> None:
    request = submit(make_engine(num_blocks=20), [1, 2], GREEDY.replace(n=3, max_tokens=None))
    assert request.max_total_tokens == 2 + (80 - 2) // 3


def test_nothing_is_cut_unless_asked() -> None:
    engine = make_engine(context=16)
    with pytest.raises(PromptTooLong):
        submit(engine, list(range(1, 40)), GREEDY)
    request = submit(engine, list(range(1, 40)), GREEDY.replace(truncate="left", max_tokens=4))
    assert request.prompt_ids == tuple(range(28, 40))


def test_truncation_leaves_at_most_half_of_the_context_to_the_answer() -> None:
    params = GREEDY.replace(truncate="left", max_tokens=1000)
    assert len(submit(make_engine(context=16), [1] * 40, params).prompt_ids) == 8
    assert len(submit(make_engine(context=16), [1] * 5, params).prompt_ids) == 5


def test_a_truncated_prompt_is_answered_like_its_rest() -> None:
    params = GREEDY.replace(truncate="left", max_tokens=4)
    answer = complete(make_engine(context=16), list(range(1, 40)), params)
    assert list(answer.token_ids) == expected(list(range(28, 40)), 4)


def test_a_deadline_in_the_past_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="deadline_s is 0"):
        submit(make_engine(), [1], GREEDY.replace(deadline_s=0.0))


def test_no_two_requests_have_one_id() -> None:
    engine = make_engine()
    submissions = [Submission([1], GREEDY.replace(n=3)), Submission([2], GREEDY)]
    requests = [request for submission in submissions * 2 for request in engine.submit(submission)]
    assert len({request.id for request in requests}) == 8


def test_a_full_queue_refuses_with_a_time_to_come_again() -> None:
    engine = make_engine(queue_limit=3)
    for _ in range(3):
        submit(engine, [1], GREEDY)
    with pytest.raises(CapacityError, match="3 requests wait already") as caught:
        submit(engine, [1], GREEDY)
    assert caught.value.retry_after_s > 0
    run_to_end(engine)
    submit(engine, [1], GREEDY)


def test_lower_priorities_fill_nobodys_queue() -> None:
    engine = make_engine(queue_limit=3)
    for _ in range(3):
        submit(engine, [1], GREEDY)
    paid = GREEDY.replace(priority=20)
    for _ in range(3):
        submit(engine, [1], paid)
    for params in (GREEDY, paid):
        with pytest.raises(CapacityError):
            submit(engine, [1], params)
    run_to_end(engine)


def test_all_choices_of_a_request_count_for_the_queue() -> None:
    with pytest.raises(CapacityError):
        submit(make_engine(queue_limit=3), [1], GREEDY.replace(n=4, max_tokens=2))


def limited(clock: SimulatedClock, **limits: float) -> Engine:
    return make_engine(clock=clock, window_s=10.0, **limits)


def test_requests_per_second_hold_over_the_window() -> None:
    clock = SimulatedClock()
    engine = limited(clock, requests_per_s=0.2)
    submit(engine, [1], GREEDY)
    clock.now += 4.0
    submit(engine, [1], GREEDY)
    with pytest.raises(CapacityError) as caught:
        submit(engine, [1], GREEDY)
    assert caught.value.retry_after_s == pytest.approx(6.0)
    clock.now += 6.0
    submit(engine, [1], GREEDY)


def test_choices_of_one_request_are_one_request() -> None:
    engine = limited(SimulatedClock(), requests_per_s=0.1)
    params = GREEDY.replace(n=3)
    first = submit(engine, [1], params)
    for choice in (1, 2):
        submit(engine, [1], params, choice=choice, fork_of=first)
    assert engine.scheduler.num_waiting == 3
    with pytest.raises(CapacityError):
        submit(engine, [1], params)


def test_tokens_per_second_count_prompt_and_longest_answer() -> None:
    clock = SimulatedClock()
    engine = limited(clock, tokens_per_s=10.0)  # 100 in 10 s
    submit(engine, [1] * 50, GREEDY)  # 70, of which an answer that ends early would give back up to 20
    with pytest.raises(CapacityError) as caught:
        submit(engine, [1] * 31, GREEDY)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    with pytest.raises(CapacityError) as caught:
        submit(engine, [1] * 11, GREEDY)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    submit(engine, [1] * 10, GREEDY)


def test_open_ends_reserve_what_answers_usually_take_not_the_context() -> None:
    engine = make_engine(clock=SimulatedClock(), window_s=10.0, tokens_per_s=200.0, context=4000, num_blocks=4000)
    open_ended = GREEDY.replace(max_tokens=None)
    for _ in range(3):  # 513 of 2,000 each
        submit(engine, [1], open_ended)
    with pytest.raises(CapacityError):
        submit(engine, [1], open_ended)


def test_what_an_open_end_takes_beyond_its_reservation_counts() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock=clock, window_s=3600.0, tokens_per_s=2000 / 3600, context=800, num_blocks=800)
    answer = complete(engine, [1], SamplingParams(temperature=0.0, ignore_eos=True))
    assert answer.usage.completion_tokens == 799
    longer = GREEDY.replace(max_tokens=200)
    submit(engine, [1] * 600, longer)  # 1,600 of 2,000
    with pytest.raises(CapacityError):
        submit(engine, [1] * 201, longer)
    submit(engine, [1] * 200, longer)


def test_the_expected_answer_rises_at_once_and_falls_slowly() -> None:
    expected_answer = ExpectedAnswer()
    assert (expected_answer.within(4000), expected_answer.within(100)) == (512, 100)
    expected_answer.observe(1500)
    assert expected_answer.within(4000) == 1500
    expected_answer.observe(100)
    assert expected_answer.within(4000) == 1150
    for _ in range(20):
        expected_answer.observe(3)
    assert expected_answer.within(4000) == 512


def test_an_idle_hour_between_two_requests_is_no_time_to_wait() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock=clock, queue_limit=1)
    for pause_s in (0.5, 0.5, 3600.0, 0.5):
        clock.now += pause_s
        complete(engine, [1], GREEDY)
    submit(engine, [1], GREEDY)
    with pytest.raises(CapacityError) as caught:
        submit(engine, [1], GREEDY)
    assert caught.value.retry_after_s < 2.0


def test_tokens_that_were_not_taken_are_given_back() -> None:
    clock = SimulatedClock()
    engine = limited(clock, tokens_per_s=10.0)
    submit(engine, [1] * 10, GREEDY.replace(max_tokens=90)).is_cancel_requested = True
    with pytest.raises(CapacityError):
        submit(engine, [1], GREEDY)
    engine.step()
    submit(engine, [1] * 70, GREEDY)


def test_a_request_that_no_window_holds_is_refused_for_ever() -> None:
    engine = limited(SimulatedClock(), tokens_per_s=5.0)
    with pytest.raises(InvalidParameter, match="may take 80 tokens, 50 are allowed"):
        submit(engine, [1] * 60, GREEDY)
    submit(engine, [1] * 10, GREEDY.replace(max_tokens=None))  # an open end takes what there is


def test_a_window_forgets_what_has_left_it() -> None:
    window = MovingWindow(rate_per_s=2.0, window_s=5.0)
    for second in range(100):
        assert window.wait_s(2.0, float(second)) == 0.0
        window.charge(2.0, float(second))
    assert window.wait_s(1.0, 99.0) == pytest.approx(1.0)


def test_a_refused_request_leaves_nothing_behind() -> None:
    engine = make_engine(queue_limit=1, requests_per_s=1000.0)
    request = submit(engine, [1], GREEDY)
    for params in (GREEDY, GREEDY.replace(deadline_s=0.0), GREEDY.replace(stop_token_ids=(9999,))):
        with pytest.raises((CapacityError, InvalidParameter)):
            submit(engine, [1], params)
    run_to_end(engine)
    assert request.is_ended
    assert is_idle(engine)
    assert not list(engine.scheduler.requests())


def test_every_limit_of_the_configuration_is_optional() -> None:
    assert EngineConfig().requests_per_s is None
    submit(make_engine(requests_per_s=None, tokens_per_s=None), [1], GREEDY)


def test_an_unknown_sampler_is_refused_at_once() -> None:
    with pytest.raises(InvalidParameter, match="nobody_registered_this"):
        submit(make_engine(), [1, 2], SamplingParams(sampler="nobody_registered_this"))


def test_when_one_of_n_answers_is_refused_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    accept = engine.scheduler.submit
    made: list[Request] = []

    def refuse_the_third(request: Request) -> None:
        if len(made) == 2:
            raise CapacityError("full", retry_after_s=1.0)
        made.append(request)
        accept(request)

    monkeypatch.setattr(engine.scheduler, "submit", refuse_the_third)
    with pytest.raises(CapacityError, match="full"):
        engine.submit(Submission([1, 2], GREEDY.replace(n=4)))
    run_to_end(engine)
    assert [request.finish_reason for request in made] == [FinishReason.CANCELLED] * 2
    assert is_idle(engine)
