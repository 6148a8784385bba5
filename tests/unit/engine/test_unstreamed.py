"""Answers that nobody reads along: one event at the end, and prompts beside them are not held back."""

from __future__ import annotations

import pytest

from kvarn.errors import AnswerError
from kvarn.types import FinishReason, SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import SimulatedClock, make_engine, run_to_end, saying

PROMPT = (5, 6, 7)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_only_event_is_the_last_and_has_the_whole_text(runs_ahead: bool) -> None:
    engine = make_engine(saying("grüße aus der mühle", bytes(PROMPT)), runs_ahead=runs_ahead)
    submit(engine, PROMPT, GREEDY.replace(max_tokens=30, ignore_eos=False), is_streamed=False)
    (event,) = run_to_end(engine)
    assert event.completion is not None
    assert event.completion.text == event.text == "grüße aus der mühle"
    assert bytes(event.completion.token_ids[:-1]).decode() == event.text


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_cancelled_one_tells_what_was_said(runs_ahead: bool) -> None:
    engine = make_engine(saying("abcdefghijkl", bytes(PROMPT)), runs_ahead=runs_ahead)
    request = submit(engine, PROMPT, GREEDY, is_streamed=False)
    for _ in range(6):
        assert engine.step() == []
    request.is_cancel_requested = True
    (event,) = engine.step()
    assert event.completion is not None
    assert event.finish_reason is FinishReason.CANCELLED
    assert event.completion.text == bytes(event.completion.token_ids).decode()
    assert event.completion.text.startswith("abcd")


def test_stop_strings_are_looked_for_all_the_same() -> None:
    engine = make_engine(saying("hello world", bytes(PROMPT)))
    submit(engine, PROMPT, GREEDY.replace(stop=("lo wo",)), is_streamed=False)
    completion = [event.completion for event in run_to_end(engine)][-1]
    assert completion is not None
    assert (completion.text, completion.stop_match) == ("hel", "lo wo")


def test_text_that_cannot_be_read_fails_its_own_request() -> None:
    engine = make_engine(saying("abc", bytes(PROMPT)))
    request, other = (submit(engine, PROMPT, GREEDY.replace(max_tokens=3), is_streamed=False) for _ in range(2))

    def fail(_: int) -> str:
        raise ValueError("no such token")

    request.text.decoder.push = fail
    texts = {event.request_id: event.text for event in run_to_end(engine)}
    assert isinstance(request.error, AnswerError)
    assert texts == {request.id: "", other.id: "abc"}


@pytest.mark.parametrize(("is_streamed", "is_held_back"), [(True, True), (False, False)])
def test_prompts_beside_them_are_computed_at_once(is_streamed: bool, is_held_back: bool) -> None:
    """A prompt as long as ten steps: beside a reader it comes in chunks that stretch no step too far."""
    clock = SimulatedClock(step_s=0.01, row_s=0.001)
    engine = make_engine(max_batch_tokens=512, num_blocks=512, context=400, clock=clock, max_stretch=2.0)
    submit(engine, PROMPT, GREEDY.replace(max_tokens=60), is_streamed=is_streamed)
    for _ in range(4):
        engine.step()
    late = submit(engine, [1 + i % 250 for i in range(100)], GREEDY, is_streamed=is_streamed)
    num_steps = 0
    while late.num_output == 0:
        engine.step()
        num_steps += 1
    assert (num_steps > 2) is is_held_back, num_steps
