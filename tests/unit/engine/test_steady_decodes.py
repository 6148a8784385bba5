"""Steps that only append one token to each answer are arrays, and nobody can tell from the answers."""

from __future__ import annotations

from typing import Any

import pytest

from kvarn.backends.fake import FakeBackend
from kvarn.engine.engine import Engine
from kvarn.engine.scheduling.plan import StepPlan
from kvarn.request import Request
from kvarn.types import SamplingParams, TokenEvent
from tests.submitting import submit
from tests.unit.engine.fake import completion_of, expected, make_engine, run_to_end, saying

SAMPLED = SamplingParams(temperature=9.0, seed=3, max_tokens=20, ignore_eos=True)
GREEDY = SAMPLED.replace(temperature=0.0)
PARAMS = [
    GREEDY,
    SAMPLED,
    SAMPLED.replace(seed=8, min_tokens=5, ignore_eos=False),
    SAMPLED.replace(logit_bias={7: 4.0, 9: -50.0}),
    SAMPLED.replace(logprobs=2, max_tokens=11),
    GREEDY.replace(stop=("\x07",)),
    SAMPLED.replace(xtc_probability=0.5, typical_p=0.9, top_k=40),
]


def plans_of(engine: Engine) -> list[StepPlan]:
    """Every plan that is made from now on."""
    plan, found = engine.scheduler.plan, []

    def planned(newest: StepPlan | None = None) -> StepPlan:
        found.append(plan(newest))
        return found[-1]

    engine.scheduler.plan = planned  # type: ignore[method-assign]
    return found


def num_steady(plans: list[StepPlan]) -> int:
    return sum(plan.decodes is not None for plan in plans)


def ordinary_engine(**options: Any) -> Engine:
    """One that plans every step in the ordinary way."""
    engine = make_engine(**options)
    engine.scheduler._steady.plan = lambda *_: None  # type: ignore[method-assign]
    return engine


def told(events: list[TokenEvent], requests: list[Request]) -> list[tuple[Any, ...]]:
    """All that the events of each request say, but for times."""
    found = []
    for request in requests:
        mine = [event for event in events if event.request_id == request.id]
        steps = [(event.text, event.token_id, event.index, event.finish_reason, event.logprob) for event in mine]
        completion = completion_of(events, request)
        found.append((steps, completion.text, completion.token_ids, completion.stop_match, completion.logprobs))
    return found


@pytest.mark.parametrize(
    "params", [PARAMS, PARAMS[:1], PARAMS[1:2], PARAMS[4:6]], ids=["all", "greedy", "drawn", "text"]
)
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "silent"])
def test_events_are_those_of_the_ordinary_way(params: list[SamplingParams], is_streamed: bool) -> None:
    answers = []
    engines = make_engine(), ordinary_engine()
    for engine in engines:
        plans = plans_of(engine)
        requests = [
            submit(engine, (5, 6, 7 + i), each, is_streamed=is_streamed or bool(each.stop))
            for i, each in enumerate(params)
        ]
        answers.append(told(run_to_end(engine), requests) if is_streamed else ends(run_to_end(engine), requests))
        assert (num_steady(plans) > 8) == (engine is engines[0])
    assert answers[0] == answers[1]


def ends(events: list[TokenEvent], requests: list[Request]) -> list[tuple[Any, ...]]:
    last = {event.request_id: event.completion for event in events if event.completion is not None}
    return [(last[one.id].text, last[one.id].token_ids, last[one.id].finish_reason) for one in requests]


def test_what_depends_on_the_tokens_before_goes_the_ordinary_way() -> None:
    engine, ordinary = make_engine(), ordinary_engine()
    answers, plans = [], plans_of(engine)
    for one in (engine, ordinary):
        requests = [submit(one, (5, 6, i), SAMPLED.replace(presence_penalty=1.5 * (i == 1))) for i in range(3)]
        answers.append(told(run_to_end(one), requests))
    assert answers[0] == answers[1]
    assert num_steady(plans) == 0


def test_min_tokens_forbid_the_end_before_the_steps_are_arrays() -> None:
    engine = make_engine(lambda _: 0)  # which would end every answer at once
    plans = plans_of(engine)
    early, other = submit(engine, (5, 6), GREEDY.replace(min_tokens=6, ignore_eos=False)), submit(engine, (7,), GREEDY)
    events = run_to_end(engine)
    assert len(completion_of(events, early).token_ids) == 7
    assert len(completion_of(events, other).token_ids) == 20
    assert num_steady(plans) > 0


def test_a_step_of_arrays_that_fails_is_computed_request_by_request() -> None:
    engine = make_engine(faults={6: RuntimeError("boom")})
    plans = plans_of(engine)
    requests = [submit(engine, (5, 6, i), GREEDY) for i in range(3)]
    events = run_to_end(engine)
    assert num_steady(plans) > 0
    assert engine.stats().retried_steps == 1
    for i, request in enumerate(requests):
        assert list(completion_of(events, request).token_ids) == expected((5, 6, i), 20)


def test_an_interrupted_step_of_arrays_is_as_if_it_had_not_begun() -> None:
    engine = make_engine(faults={6: KeyboardInterrupt()})
    requests = [submit(engine, (5, 6, i), SAMPLED) for i in range(3)]
    events = [event for _ in range(6) for event in engine.step()]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.kv.check()
    ordinary = ordinary_engine()
    asked = [submit(ordinary, (5, 6, i), SAMPLED) for i in range(3)]
    assert told([*events, *run_to_end(engine)], requests) == told(run_to_end(ordinary), asked)


def test_who_was_preempted_and_starts_again_is_read_from_its_new_blocks() -> None:
    for num_steps in range(2, 12):
        engine = make_engine()
        requests = [submit(engine, (5, 6, i), GREEDY.replace(priority=i)) for i in range(3)]
        events = [event for _ in range(num_steps) for event in engine.step()]
        engine.scheduler.preempt(requests[-1])
        events += run_to_end(engine)
        for i, request in enumerate(requests):
            assert list(completion_of(events, request).token_ids) == expected((5, 6, i), 20)


def test_an_idle_engine_keeps_no_request() -> None:
    engine = make_engine(saying("hello", "x"))
    submit(engine, b"x", GREEDY.replace(ignore_eos=False))
    run_to_end(engine)
    assert engine._newest is None
    request = submit(engine, b"x", GREEDY)
    engine.step()
    engine.step()
    request.is_cancel_requested = True
    engine.step()
    assert engine._newest is None


def test_positions_alone_are_written_again_for_the_same_requests() -> None:
    engine = make_engine()
    backend: FakeBackend = engine.backend  # type: ignore[assignment]
    sample, bases = backend.sample, []

    def watched(hidden: Any, rows: Any) -> Any:
        bases.append(getattr(rows.params, "base", None))
        return sample(hidden, rows)

    backend.sample = watched  # type: ignore[method-assign]
    submit(engine, (5, 6, 7), SAMPLED)
    run_to_end(engine)
    steady = [base for base in bases if base is not None]
    assert len(steady) > 15
    assert all(base is steady[0] for base in steady)
