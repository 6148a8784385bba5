"""A backend that runs ahead: a step is launched before the last is read, and nobody can tell from the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvarn.backends.batch import Batch, Sampled, SampleRows
from kvarn.backends.fake import FakeBackend
from kvarn.engine.engine import Engine
from kvarn.request import Request, RequestState
from kvarn.types import FinishReason, SamplingParams, TokenEvent
from tests.submitting import submit
from tests.unit.engine.fake import completion_of, expected, make_engine, run_to_end, saying

PROMPT = (5, 6, 7)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Watched:
    """Writes down when steps begin and when they are read; a read may fail."""

    def __init__(self, engine: Engine) -> None:
        self.log: list[str] = []
        self.fails_at: int | None = None  # the read of this number
        self._backend: FakeBackend = engine.backend  # type: ignore[assignment]
        self._forward, self._sample_later = self._backend.forward, self._backend.sample_later
        self._backend.forward = self.forward  # type: ignore[method-assign]
        self._backend.sample_later = self.sample_later  # type: ignore[method-assign]

    @property
    def num_reads(self) -> int:
        return self.log.count("read")

    def forward(self, batch: Batch) -> Any:
        self.log.append("launch" if (batch.token_ids < 0).any() else "forward")
        return self._forward(batch)

    def sample_later(self, hidden: Any, rows: SampleRows) -> Callable[[], Sampled]:
        read = self._sample_later(hidden, rows)

        def watched() -> Sampled:
            self.log.append("read")
            if self.num_reads == self.fails_at:
                raise RuntimeError("the device is lost")
            return read()

        return watched


def ids_of(engine: Engine, request: Request, events: Sequence[TokenEvent] = ()) -> list[int]:
    return list(completion_of([*events, *run_to_end(engine)], request).token_ids)


def some_steps(engine: Engine, number: int) -> list[TokenEvent]:
    return [event for _ in range(number) for event in engine.step()]


def test_a_step_is_launched_before_the_last_is_read() -> None:
    engine = make_engine(runs_ahead=True)
    watched = Watched(engine)
    request = submit(engine, PROMPT, GREEDY)
    assert ids_of(engine, request) == expected(PROMPT, 8)
    assert watched.log[:6] == ["forward", "launch", "read", "launch", "read", "launch"]
    assert watched.log.count("launch") == 7, "the last token needs no step of its own, as its length is known"
    assert engine.kv.stats().used == 0


def test_an_end_that_was_not_foreseen_costs_one_row_and_nothing_else() -> None:
    engine = make_engine(saying("ab", bytes(PROMPT)), runs_ahead=True)
    request, other = (submit(engine, PROMPT, GREEDY.replace(ignore_eos=eos)) for eos in (False, True))
    events = run_to_end(engine)
    assert completion_of(events, request).text == "ab"
    assert completion_of(events, request).finish_reason is FinishReason.STOP
    assert len(completion_of(events, other).token_ids) == 8
    assert engine.kv.stats().used == 0


def test_stop_strings_end_where_they_would() -> None:
    engine = make_engine(saying("hello world", bytes(PROMPT)), runs_ahead=True)
    request = submit(engine, PROMPT, GREEDY.replace(max_tokens=30, stop=("lo wo",)))
    completion = completion_of(run_to_end(engine), request)
    assert (completion.text, completion.stop_match) == ("hel", "lo wo")


def test_choices_that_depend_on_the_last_token_wait_for_it() -> None:
    engine, waiting = make_engine(runs_ahead=True), make_engine()
    params = [GREEDY.replace(presence_penalty=1.5), GREEDY, GREEDY.replace(temperature=9.0, seed=3, logprobs=2)]
    watched = Watched(engine)
    asked = [[submit(one, (*PROMPT, i), each) for i, each in enumerate(params)] for one in (engine, waiting)]
    ahead, alone = (run_to_end(one) for one in (engine, waiting))
    for mine, theirs in zip(*asked, strict=True):
        ours, plain = completion_of(ahead, mine), completion_of(alone, theirs)
        assert (ours.token_ids, ours.logprobs) == (plain.token_ids, plain.logprobs)
    assert "launch" in watched.log


def test_scores_of_a_prompt_are_waited_for() -> None:
    engine, waiting = make_engine(runs_ahead=True), make_engine()
    requests = [submit(one, PROMPT, GREEDY.replace(prompt_logprobs=2)) for one in (engine, waiting)]
    first, second = (completion_of(run_to_end(one), r) for one, r in zip((engine, waiting), requests, strict=True))
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.token_ids == second.token_ids


def test_a_request_cancelled_with_a_token_under_way_ends_at_once() -> None:
    engine = make_engine(runs_ahead=True)
    request, other = submit(engine, PROMPT, GREEDY), submit(engine, (9, 9), GREEDY)
    before = some_steps(engine, 3)
    request.is_cancel_requested = True
    events = engine.step()
    assert request.state is RequestState.CANCELLED
    (last,) = [event for event in events if event.request_id == request.id]
    assert last.completion is not None
    assert list(last.completion.token_ids) == expected(PROMPT, 8)[: len(last.completion.token_ids)]
    assert ids_of(engine, other, [*before, *events]) == expected((9, 9), 8)
    assert engine.kv.stats().used == 0


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_request_preempted_with_a_token_under_way_keeps_it(num_steps: int) -> None:
    engine = make_engine(runs_ahead=True)
    request = submit(engine, PROMPT, GREEDY)
    before = some_steps(engine, num_steps)
    engine.scheduler.preempt(request)
    assert ids_of(engine, request, before) == expected(PROMPT, 8)
    assert engine.kv.stats().used == 0


def test_a_token_that_was_settled_late_undoes_the_step_that_took_another() -> None:
    engine = make_engine(runs_ahead=True)
    backend: FakeBackend = engine.backend  # type: ignore[assignment]
    numbers = iter(range(1000))
    backend.is_late = lambda: next(numbers) % 3 == 1
    requests = [submit(engine, (*PROMPT, i), GREEDY) for i in range(3)]
    events = run_to_end(engine)
    for i, request in enumerate(requests):
        assert list(completion_of(events, request).token_ids) == expected((*PROMPT, i), 8)
    engine.kv.check()


@pytest.mark.parametrize("read", range(1, 9))
def test_a_read_that_fails_is_computed_again(read: int) -> None:
    engine = make_engine(runs_ahead=True)
    watched = Watched(engine)
    watched.fails_at = read
    requests = [submit(engine, (*PROMPT, i), GREEDY) for i in range(3)]
    events = run_to_end(engine)
    for i, request in enumerate(requests):
        assert list(completion_of(events, request).token_ids) == expected((*PROMPT, i), 8)
    assert engine.stats().retried_steps == 1
    engine.kv.check()


def test_a_launch_that_fails_is_computed_as_any_other_step() -> None:
    engine = make_engine(runs_ahead=True, faults={3: RuntimeError("no memory")})
    request = submit(engine, PROMPT, GREEDY)
    assert ids_of(engine, request) == expected(PROMPT, 8)
    assert engine.stats().retried_steps == 1


def test_scores_that_are_no_numbers_fail_their_request_alone() -> None:
    engine = make_engine(runs_ahead=True, poison={77: "nan"})
    broken, healthy = submit(engine, (77,), GREEDY), submit(engine, PROMPT, GREEDY)
    events = run_to_end(engine)
    assert broken.state is RequestState.FAILED
    assert list(completion_of(events, healthy).token_ids) == expected(PROMPT, 8)


def test_several_answers_to_one_prompt() -> None:
    params = SamplingParams(temperature=9.0, seed=4, max_tokens=8, n=3, ignore_eos=True)
    answers = []
    for runs_ahead in (False, True):
        engine = make_engine(runs_ahead=runs_ahead)
        first = submit(engine, PROMPT, params)
        others = [submit(engine, PROMPT, params, choice=choice, fork_of=first) for choice in (1, 2)]
        events = run_to_end(engine)
        answers.append([completion_of(events, request).token_ids for request in (first, *others)])
    assert answers[0] == answers[1]
    assert np.unique(answers[0], axis=0).shape[0] == 3
