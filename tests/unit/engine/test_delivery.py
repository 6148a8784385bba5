"""Tokens on their way into an event loop: every one at once, several together where the loop is behind, same text."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.delivery.async_answers import PolledText
from kvarn.engine.delivery.drain_pacing import (
    ARRIVAL_S,
    BEHIND_SHARE,
    MAX_DELAY_ARRIVALS_S,
    MAX_DELAY_S,
    DrainPacing,
)
from kvarn.engine.submission import Submission
from kvarn.errors import AnswerError
from kvarn.types import FinishReason, SamplingParams, TokenEvent
from tests.unit.engine.fake import EOS, make_engine, saying, tokens_of
from tests.unit.engine.stepping import eventually, is_idle

PROMPT = b"hi"
STORY = "grüße aus der mühle: 製粉所 🌾 und noch ein wort."
GREEDY = SamplingParams(temperature=0.0, max_tokens=150)


def late(_: DrainPacing, began_at: float, work_s: float, num_steps: int, num_arrivals: int) -> float:
    return began_at + 0.03


def slow(rule: Callable[..., int]) -> Callable[..., int]:
    def wait(tokens: object) -> int:
        time.sleep(0.003)
        return rule(tokens)

    return wait


async def read(client: EngineClient, params: SamplingParams, prompt: bytes = PROMPT) -> list[TokenEvent]:
    answers = client.stream_async(1, polls_tokens=True)
    await answers.submit([Submission(tokens_of(prompt), params)])
    found = [event async for batch in answers.batches() for _, event in batch]
    answers.release()
    return found


def num_tokens(events: list[TokenEvent]) -> int:
    return sum(event.num_more + (event.token_id is not None) for event in events)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("stop", [(), ("wort",), ("nie gesagt", "ch ein")])
def test_a_loop_that_is_behind_reads_the_same_text_in_fewer_events(
    runs_ahead: bool, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(slow(saying(STORY, PROMPT)), runs_ahead=runs_ahead)
    client = EngineClient(engine)
    params = GREEDY.replace(stop=stop)
    whole = client.complete([Submission(tokens_of(PROMPT), params)])[0]
    at_once = asyncio.run(read(client, params))
    monkeypatch.setattr(DrainPacing, "next_at", late)
    behind = asyncio.run(read(client, params))
    for events in (at_once, behind):
        last = events[-1].completion
        assert last is not None
        assert "".join(event.text for event in events) == whole.text == last.text
        assert num_tokens(events) == whole.usage.completion_tokens == last.usage.completion_tokens
        assert events[-1].finish_reason is whole.finish_reason is FinishReason.STOP
    assert len(behind) < len(at_once) / 2
    assert eventually(lambda: is_idle(client)), "the end is told at once, and the last step may still be under way"
    client.close()


@pytest.mark.parametrize("stop", [(), ("wort",)])
def test_the_end_of_an_answer_waits_for_no_drain(stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    client = EngineClient(make_engine(slow(saying(STORY, PROMPT))))
    monkeypatch.setattr(DrainPacing, "next_at", lambda _, began_at, *__: began_at + 60.0)
    started = time.monotonic()
    events = asyncio.run(read(client, GREEDY.replace(stop=stop)))
    assert time.monotonic() - started < 30.0, "the next drain is due in a minute"
    last = events[-1].completion
    assert last is not None
    assert "".join(event.text for event in events) == last.text
    client.close()


def test_a_loop_that_is_not_behind_gets_every_token_by_itself() -> None:
    client = EngineClient(make_engine(slow(saying(STORY, PROMPT))))
    events = asyncio.run(read(client, GREEDY))
    alone = [event for event in events if event.num_more == 0]
    assert len(alone) >= 0.7 * len(tokens_of(STORY)), "the machine may be late at times, not as a rule"
    client.close()


def test_logprobs_are_told_token_by_token_even_where_the_loop_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrainPacing, "next_at", late)
    client = EngineClient(make_engine(slow(saying(STORY, PROMPT))))
    events = asyncio.run(read(client, GREEDY.replace(logprobs=2)))
    scored = [event.logprob for event in events if event.logprob is not None]
    assert [one.token_id for one in scored] == [*tokens_of(STORY), EOS]
    client.close()


def test_any_moments_of_looking_give_the_same_text() -> None:
    chooser = random.Random(7)
    for _ in range(30):
        engine = make_engine(saying(STORY, PROMPT), runs_ahead=chooser.random() < 0.5)
        (request,) = engine.submit(Submission(tokens_of(PROMPT), GREEDY, is_polled=True))
        text, told, last = PolledText(request), [], None
        while last is None:
            last = next((event for event in engine.step() if event.completion is not None), None)
            if chooser.random() < 0.4 and (event := text.poll()) is not None:
                told.append(event)
        assert text.poll() is None  # the last event tells the rest
        told.append(text.last(last))
        assert last.completion is not None
        assert "".join(event.text for event in told) == STORY == last.completion.text
        assert num_tokens(told) == last.completion.usage.completion_tokens


def test_a_stop_token_that_is_text_is_not_told() -> None:
    engine = make_engine(saying("abcdef", PROMPT))
    params = GREEDY.replace(stop_token_ids=(ord("d"),))
    (request,) = engine.submit(Submission(tokens_of(PROMPT), params, is_polled=True))
    text, said = PolledText(request), ""
    while not request.is_ended:
        last = engine.step()
        event = text.poll()
        said += event.text if event is not None else ""
    assert said + text.last(last[-1]).text == "abc"


def test_one_that_is_cancelled_while_its_reader_is_behind_tells_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrainPacing, "next_at", late)
    client = EngineClient(make_engine(slow(saying(STORY * 3, PROMPT))))

    async def leave() -> list[TokenEvent]:
        answers = client.stream_async(1, polls_tokens=True)
        await answers.submit([Submission(tokens_of(PROMPT), GREEDY)])
        found: list[TokenEvent] = []
        async for batch in answers.batches():
            found += [event for _, event in batch]
            answers.cancel()
        answers.release()
        return found

    events = asyncio.run(leave())
    completion = events[-1].completion
    assert completion is not None
    assert completion.finish_reason is FinishReason.CANCELLED
    assert "".join(event.text for event in events) == completion.text
    assert num_tokens(events) == completion.usage.completion_tokens
    assert eventually(lambda: is_idle(client))
    client.close()


def test_a_reader_that_stands_still_finds_one_event_and_holds_up_nobody() -> None:
    client = EngineClient(make_engine(slow(saying(STORY, PROMPT))))

    async def both() -> tuple[list[TokenEvent], list[TokenEvent]]:
        standing = client.stream_async(1, polls_tokens=True)
        await standing.submit([Submission(tokens_of(PROMPT), GREEDY)])
        moving = await read(client, GREEDY)
        rest = [event async for batch in standing.batches() for _, event in batch]
        standing.release()
        return moving, rest

    moving, rest = asyncio.run(both())
    assert len(rest) == 2, "all but the end, and the end"
    assert "".join(event.text for event in rest) == "".join(event.text for event in moving) == STORY
    assert len(moving) > len(tokens_of(STORY)) / 2
    client.close()


def test_text_that_cannot_be_read_fails_its_own_answer_alone() -> None:
    engine = make_engine(slow(saying(STORY, PROMPT)))
    client = EngineClient(engine)

    async def one_of_two() -> list[TokenEvent]:
        broken = client.stream_async(1, polls_tokens=True)
        await broken.submit([Submission(tokens_of(PROMPT), GREEDY)])
        request = broken.collectors[0].requests[0]
        request.text.reader.push_all = lambda _: 1 / 0
        good = await read(client, GREEDY)
        with pytest.raises(AnswerError, match="could not be read"):
            async for _ in broken.batches():
                pass
        broken.release()
        return good

    assert "".join(event.text for event in asyncio.run(one_of_two())) == STORY
    client.close()


def test_a_drain_waits_only_where_its_work_is_much_beside_a_step() -> None:
    pacing, at = DrainPacing(), 100.0
    for step in range(20):
        at += 0.010
        assert pacing.next_at(at, 0.9 * BEHIND_SHARE * 0.010, step) == at
    waits = []
    for step in range(20, 40):
        at += 0.010
        waits.append(pacing.next_at(at, 0.009, step) - at)
    assert 0 < waits[-1] <= MAX_DELAY_S + 1e-9
    assert max(waits) <= MAX_DELAY_S + 1e-9
    assert pacing.next_at(at + 60, 0.0001, 41) == at + 60, "after a pause all comes at once"


def test_drains_wait_longer_while_requests_come_and_no_longer_than_they_may() -> None:
    delays = []
    for num_arrivals in (0, 1, 10, 1000):
        pacing = DrainPacing()
        for step in range(20):
            at = 100.0 + 0.010 * step
            due_at = pacing.next_at(at, 0.009, step, num_arrivals)
        delays.append(due_at - at)
    assert delays == pytest.approx(
        [MAX_DELAY_S, MAX_DELAY_S + ARRIVAL_S, MAX_DELAY_S + 10 * ARRIVAL_S, MAX_DELAY_ARRIVALS_S]
    )
