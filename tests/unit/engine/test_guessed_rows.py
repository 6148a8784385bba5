"""Guessed tokens have rows in a step only where nobody else would find it longer, in blocks nobody else may need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarn.decoding.speculation.draft_length import Always
from kvarn.decoding.speculation.drafters import Proposal
from kvarn.decoding.speculation.speculation import Speculation
from kvarn.engine.engine import Engine
from kvarn.request import Request
from kvarn.types import SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import SimulatedClock, make_engine, run_to_end

NUM_GUESSES = 3
ANSWER = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


class Sevens:
    """Guesses what the model always says."""

    source = "script"

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        return Proposal(self.source, [7] * min(NUM_GUESSES, max_tokens), 3)


def guessing(**options: Any) -> Engine:
    """An engine that computes all guesses it may; a step takes time by its rows."""
    engine = make_engine(lambda _: 7, clock=SimulatedClock(step_s=0.01, row_s=0.001), **options)
    engine.decoder.speculation = Speculation(frozenset(), Always(), lambda _: True)
    engine.decoder.speculation.extra.append(lambda _: iter([Sevens()]))
    return engine


def ask(engine: Engine, num_prompt: int = 4, first: int = 1, **params: Any) -> Request:
    return submit(engine, [first] * num_prompt, ANSWER.replace(**params))


def num_guessed(engine: Engine, num_steps: int = 1) -> list[int]:
    """Guesses in each of the next steps."""
    assert engine.decoder.speculation is not None
    counts, found = engine.decoder.speculation.counts, []
    for _ in range(num_steps):
        before = counts.num_draft_tokens
        engine.step()
        engine.kv.check()
        found.append(counts.num_draft_tokens - before)
    return found


def begun(engine: Engine, *requests: Request) -> Sequence[Request]:
    """Step until all of them decode."""
    while any(request.is_prefilling or not request.num_output for request in requests):
        engine.step()
    return requests


def test_requests_that_decode_alone_have_all_their_guesses() -> None:
    engine = guessing()
    begun(engine, ask(engine), ask(engine, first=2))
    assert num_guessed(engine, 5) == [2 * NUM_GUESSES] * 5


def test_no_guess_is_computed_beside_a_prompt() -> None:
    engine = guessing(max_batch_tokens=16)
    begun(engine, ask(engine))
    assert num_guessed(engine) == [NUM_GUESSES]
    late, beside = ask(engine, num_prompt=90, first=2), []
    while not late.num_output:
        beside += num_guessed(engine)
    assert len(beside) > 5
    assert set(beside) == {0}
    assert num_guessed(engine) == [2 * NUM_GUESSES]


def test_no_guess_is_computed_while_somebody_waits() -> None:
    engine = guessing(max_running=1)
    begun(engine, ask(engine))
    waiting = ask(engine, first=2)
    assert num_guessed(engine, 5) == [0] * 5
    waiting.is_cancel_requested = True
    engine.step()
    assert num_guessed(engine, 5) == [NUM_GUESSES] * 5


def test_no_guess_is_computed_in_a_step_that_a_lower_priority_shares() -> None:
    engine = guessing(policy="priority")
    high, low = begun(engine, ask(engine, priority=50), ask(engine, first=2, priority=0))
    shared, own = [], []
    for _ in range(40):
        before = low.num_output
        guessed = num_guessed(engine)
        (shared if low.num_output > before else own).extend(guessed)
        if high.is_ended:
            break
    assert set(shared) == {0}
    assert set(own) == {NUM_GUESSES}
    high.is_cancel_requested = True
    engine.step()
    assert num_guessed(engine, 3) == [NUM_GUESSES] * 3


def test_no_guess_takes_a_block_that_another_answer_may_need() -> None:
    """Three blocks are kept free for each request that runs: its next token, and copies of shared blocks."""
    engine = guessing(num_blocks=16, context=40)
    begun(engine, ask(engine, max_tokens=30), ask(engine, first=2, max_tokens=30))
    found = []
    while engine.has_work:
        spare = (engine.kv.num_free - 3 * engine.scheduler.num_running) * engine.kv.block_size
        (guessed,) = num_guessed(engine)
        assert guessed <= max(0, spare)
        found.append(guessed)
    assert 0 < found.count(0) < len(found)


def test_a_step_with_guesses_has_no_more_rows_than_any_other() -> None:
    engine = guessing(max_batch_tokens=5)
    begun(engine, *(ask(engine, first=first) for first in (1, 2, 3)))
    assert num_guessed(engine, 5) == [2] * 5


def test_guesses_are_right_or_leave_no_trace() -> None:
    engine = guessing()
    ask(engine)
    events = run_to_end(engine)
    assert [event.completion.token_ids for event in events if event.completion is not None] == [(7,) * 100]
