"""What fails in one answer's text, stop strings, penalties or constraint ends that answer; its neighbours go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.engine.stream import Stream
from kvarn.engine.submission import Submission
from kvarn.errors import AnswerError, InvalidParameter
from kvarn.request import Request
from kvarn.structured.constraints import Regex
from kvarn.types import FinishReason, SamplingParams, TokenEvent
from tests.submitting import submit, submit_to
from tests.unit.engine.fake import EOS, ByteText, completion_of, expected, is_idle, make_engine, run_to_end

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [list(range(1, 40)), [7], [3, 1, 4, 1, 5, 9, 2, 6]]
VICTIM = [11, 12, 13]


class Panic(BaseException):
    """As a panic of a library in Rust arrives: not an Exception."""


def answer(prompt: Sequence[int], num_tokens: int = 20) -> list[int]:
    said: list[int] = []
    while len(said) < num_tokens:
        said += expected([*prompt, *said], num_tokens - len(said))
    return said


class UnreadableToken(ByteText):
    """Reading one token raises, as where a tokenizer does not know it."""

    def __init__(self, bad: int, error: BaseException) -> None:
        super().__init__(False, frozenset())
        self._bad, self._error = bad, error

    def push(self, token_id: int) -> str:
        if token_id == self._bad:
            raise self._error
        return super().push(token_id)


class UnreadableEnd(ByteText):
    """What is held back at the end cannot be read."""

    def flush(self) -> str:
        raise RuntimeError("the end of the text")


class BrokenMatcher:
    """A grammar that fails when asked, or when told, after some tokens."""

    error = None

    def __init__(self, fails_in: str, error: BaseException) -> None:
        self._fails_in, self._error, self._num_asked = fails_in, error, 0

    def matcher(self) -> BrokenMatcher:
        if self._fails_in == "start":
            raise self._error
        return self

    def mask_after(self, token_ids: Sequence[int], num_prompt: int) -> Any:
        self._num_asked += 1
        if self._fails_in == "mask" and self._num_asked > 3:
            raise self._error
        return np.full(8, 0xFFFFFFFF, np.uint32)

    def accept_token(self, token_id: int) -> bool:
        if self._fails_in == "accept" and self._num_asked > 3:
            raise self._error
        return False


class BrokenStops:
    """Stop strings that cannot be looked for."""

    found = None

    def push(self, text: str) -> NoReturn:
        raise RuntimeError("stop strings")

    flush = push


def break_text(engine: Engine, error: BaseException) -> Request:
    request = submit(engine, VICTIM, GREEDY)
    request.text.decoder = UnreadableToken(answer(VICTIM)[5], error)
    return request


def break_end(engine: Engine, _: BaseException) -> Request:
    request = submit(engine, VICTIM, GREEDY)
    request.text.decoder = UnreadableEnd(False, frozenset())
    return request


def break_stops(engine: Engine, _: BaseException) -> Request:
    request = submit(engine, VICTIM, GREEDY.replace(stop=("never",)))
    request.text.matcher = BrokenStops()
    return request


def break_grammar(fails_in: str) -> Callable[[Engine, BaseException], Request]:
    def broken(engine: Engine, error: BaseException) -> Request:
        compiled = BrokenMatcher(fails_in, error)
        return submit(engine, VICTIM, GREEDY.replace(constraint=Regex("x"), ignore_eos=False), constraint=compiled)

    return broken


def break_penalties(engine: Engine, error: BaseException) -> Request:
    def encode(_: str) -> NoReturn:
        raise error

    engine.decoder._encode = encode  # type: ignore[attr-defined]
    return submit(engine, VICTIM, GREEDY.replace(dry_multiplier=1.0))


def break_span(engine: Engine, error: BaseException) -> Request:
    decoder, real = engine.decoder, engine.decoder.span

    def span(request: Request, max_rows: int) -> Any:
        if request is victim and request.num_output == 5:
            raise error
        return real(request, max_rows)

    decoder.span = span  # type: ignore[method-assign]
    decoder.is_steady = lambda request: request is not victim  # type: ignore[attr-defined]  # asked for spans at all
    victim = submit(engine, VICTIM, GREEDY)
    return victim


STAGES = {
    "plan": break_span,
    "text": break_text,
    "end of the text": break_end,
    "stop strings": break_stops,
    "start of the grammar": break_grammar("start"),
    "mask of the grammar": break_grammar("mask"),
    "token of the grammar": break_grammar("accept"),
    "penalties": break_penalties,
}
ERRORS = [
    RuntimeError("boom"),
    InvalidParameter("token id 5 is not in the vocabulary", field=None),
    MemoryError(),
    Panic("panic"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_in_one_answer_ends_that_answer_and_no_other(stage: str, error: BaseException) -> None:
    engine = make_engine()
    others = [submit(engine, prompt, GREEDY) for prompt in PROMPTS]
    victim = STAGES[stage](engine, error)
    events = run_to_end(engine)
    assert victim.finish_reason is FinishReason.FAILED
    assert isinstance(victim.error, AnswerError)
    assert "this answer" in str(victim.error) or "the constraint failed" in str(victim.error)
    assert [event.finish_reason for event in events if event.request_id == victim.id][-1] is FinishReason.FAILED
    for prompt, request in zip(PROMPTS, others, strict=True):
        assert list(completion_of(events, request).token_ids) == answer(prompt)
    assert engine.stats().retried_steps == 0  # nobody was computed twice for it
    assert is_idle(engine)


def test_what_was_said_before_the_failure_was_delivered() -> None:
    engine = make_engine()
    victim = break_text(engine, RuntimeError("boom"))
    events = [event for event in run_to_end(engine) if event.request_id == victim.id]
    assert [event.token_id for event in events[:-1]] == answer(VICTIM)[:5]
    assert str(answer(VICTIM)[5]) in str(victim.error)


def test_a_cancelled_answer_whose_end_cannot_be_read_ends_all_the_same() -> None:
    engine = make_engine()
    other, victim = submit(engine, PROMPTS[0], GREEDY), break_end(engine, RuntimeError())
    events = [*engine.step(), *engine.step()]
    victim.is_cancel_requested = True
    events += run_to_end(engine)
    assert victim.finish_reason is FinishReason.CANCELLED
    assert list(completion_of(events, other).token_ids) == answer(PROMPTS[0])
    assert is_idle(engine)


def test_ctrl_c_is_not_taken_for_a_failure_of_an_answer() -> None:
    engine = make_engine()
    victim = break_text(engine, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_to_end(engine)
    assert not victim.is_ended


def test_an_answer_that_cannot_be_opened_is_refused_and_costs_nothing() -> None:
    engine = make_engine(requests_per_s=0.1, window_s=10.0)  # one request
    real = engine.stream

    def broken(_: bool, __: frozenset[int]) -> NoReturn:
        raise RuntimeError("no text decoder")

    engine.stream = Stream(broken, (EOS,))
    with pytest.raises(RuntimeError, match="no text decoder"):
        submit(engine, VICTIM, GREEDY)
    engine.stream = real
    request = submit(engine, VICTIM, GREEDY)
    assert list(completion_of(run_to_end(engine), request).token_ids) == answer(VICTIM)


def test_the_thread_lives_on_after_many_failures_in_a_row() -> None:
    engine = make_engine()
    bad = answer(VICTIM)[0]
    engine.stream = Stream(lambda *_: UnreadableToken(bad, Panic("panic")), (EOS,))
    client = EngineClient(engine)
    try:
        for _ in range(10):
            with pytest.raises(AnswerError, match="panic"):
                submit_to(client, VICTIM, GREEDY).result(timeout=60)
        assert client.is_alive
        fine = next(prompt for prompt in PROMPTS if bad not in answer(prompt))
        assert list(submit_to(client, fine, GREEDY).result(timeout=60).token_ids) == answer(fine)
    finally:
        client.close()


def test_a_reader_that_fails_on_an_event_takes_no_other_reader_along() -> None:
    engine = make_engine()
    client = EngineClient(engine)

    def broken(_: int, event: TokenEvent) -> bool:
        raise RuntimeError("the reader failed")

    async def run() -> list[int]:
        good = client.stream_async(1, None)
        bad = client.stream_async(1, broken)
        await asyncio.gather(*(a.submit([Submission(PROMPTS[0], GREEDY)]) for a in (bad, good)))
        with pytest.raises(RuntimeError, match="the reader failed"):
            await bad.results()
        return list((await asyncio.wait_for(good.results(), 60))[0].token_ids)

    try:
        assert asyncio.run(run()) == answer(PROMPTS[0])
    finally:
        client.close()
