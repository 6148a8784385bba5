"""Callers taking turns: streams, threads, cancellation, closing."""

from __future__ import annotations

import gc
import threading

import pytest

from kvarn.engine.engine import Engine
from kvarn.engine.runner import Runner
from kvarn.errors import BackendError, RequestError
from kvarn.types import FinishReason, SamplingParams
from tests.unit.engine.fake import complete, make_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)


@pytest.fixture
def engine() -> Engine:
    return make_engine(num_blocks=300)


def is_idle(engine: Engine) -> bool:
    engine.kv.check()
    return not engine.has_work and engine.kv.num_free == engine.kv.num_blocks


def test_a_stream_yields_every_token_and_then_ends(engine: Engine) -> None:
    events = list(Runner(engine).submit([1, 2, 3], GREEDY))
    assert [event.index for event in events] == list(range(15))
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert is_idle(engine)


def test_two_streams_read_alternately_share_steps_and_do_not_mix(engine: Engine) -> None:
    alone = [complete(make_engine(), [seed], GREEDY).token_ids for seed in (1, 2)]
    runner = Runner(engine)
    pairs = list(zip(runner.submit([1], GREEDY), runner.submit([2], GREEDY), strict=True))
    assert [tuple(event.token_id for event in events) for events in zip(*pairs, strict=True)] == alone
    assert 2 in engine.backend.batch_sizes  # type: ignore[attr-defined]


def test_many_threads_get_what_each_would_get_alone(engine: Engine) -> None:
    runner, answers = Runner(engine), {}

    def ask(seed: int) -> None:
        answers[seed] = runner.submit([seed, seed + 1], GREEDY).completion().token_ids

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert answers == {s: complete(make_engine(), [s, s + 1], GREEDY).token_ids for s in range(1, 13)}
    assert is_idle(engine)


def test_closing_a_stream_cancels_and_frees(engine: Engine) -> None:
    stream = Runner(engine).submit([1, 2, 3], GREEDY)
    next(stream)
    stream.close()
    assert is_idle(engine)
    assert list(stream) == []


def test_a_stream_that_is_dropped_unread_cancels_and_frees(engine: Engine) -> None:
    runner = Runner(engine)
    runner.submit([1, 2, 3], GREEDY)
    gc.collect()
    assert is_idle(engine)


def test_cancelling_a_stream_still_gives_what_was_said(engine: Engine) -> None:
    stream = Runner(engine).submit([1, 2, 3], GREEDY)
    first = next(stream)
    stream.cancel()
    completion = stream.completion()
    assert completion.finish_reason is FinishReason.CANCELLED
    assert completion.token_ids == (first.token_id,)
    assert is_idle(engine)


def test_a_failure_is_raised_to_the_caller_whose_request_failed() -> None:
    engine = make_engine(faults={1: RuntimeError("boom")})
    runner = Runner(engine)
    with pytest.raises(BackendError, match="boom"):
        runner.submit([1, 2, 3], GREEDY).completion()
    assert runner.submit([1, 2, 3], GREEDY).completion().finish_reason is FinishReason.LENGTH


def test_a_whole_pass_waits_for_room(engine: Engine) -> None:
    runner = Runner(engine)
    stream = runner.submit([1] * 100, GREEDY.replace(max_tokens=50))
    next(stream)
    assert not engine.scheduler.has_room(1100)
    with runner.exclusively(1100) as held:
        assert held.scheduler.has_room(1100)
    assert len(list(stream)) == 49


def test_a_closed_runner_refuses_and_releases_once(engine: Engine) -> None:
    runner, released = Runner(engine), []
    stream = runner.submit([1], GREEDY)
    runner.close(lambda: released.append(1))
    runner.close(lambda: released.append(1))
    assert released == [1]
    with pytest.raises(RequestError, match="closed"):
        next(stream)
    with pytest.raises(RequestError, match="closed"):
        runner.submit([1], GREEDY)
