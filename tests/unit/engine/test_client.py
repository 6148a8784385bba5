"""One thread owns the engine: submitting, streaming and cancelling from other threads."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from kvarn.engine.client import EngineClient, EventStream
from kvarn.engine.engine import Engine
from kvarn.engine.handle import OutputCollector
from kvarn.engine.submission import Submission
from kvarn.errors import InvalidParameter, RequestError
from kvarn.request import RequestState
from kvarn.types import FinishReason, SamplingParams, TokenEvent
from tests.submitting import submit_to
from tests.unit.engine.fake import complete, make_engine
from tests.unit.engine.stepping import ENDLESS, GREEDY, Gate, batch_sizes, eventually, is_idle, slowly


def test_a_handle_yields_every_token_and_then_ends(client: EngineClient) -> None:
    handle = submit_to(client, [1, 2, 3], GREEDY)
    events = list(handle)
    assert [event.index for event in events] == list(range(15))
    assert {event.request_id for event in events} == {handle.id}
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert handle.result() is events[-1].completion
    assert handle.state is RequestState.FINISHED
    assert list(handle) == []
    assert is_idle(client)


def test_requests_share_steps_and_do_not_mix(client: EngineClient, engine: Engine) -> None:
    alone = [complete(make_engine(), [seed], GREEDY).token_ids for seed in (1, 2)]
    submissions = [Submission([1], GREEDY), Submission([2], GREEDY)]
    handles = client.submit_all(submissions, OutputCollector(), OutputCollector())
    assert [handle.result().token_ids for handle in handles] == alone
    assert 2 in batch_sizes(engine)


def test_many_threads_get_what_each_would_get_alone(client: EngineClient) -> None:
    answers = {}

    def ask(seed: int) -> None:
        answers[seed] = submit_to(client, [seed, seed + 1], GREEDY).result(30).token_ids

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert answers == {s: complete(make_engine(), [s, s + 1], GREEDY).token_ids for s in range(1, 13)}
    assert is_idle(client)


def test_closing_a_stream_cancels_and_frees(client: EngineClient) -> None:
    stream = EventStream(submit_to(client, [1, 2, 3], ENDLESS))
    next(stream)
    stream.close()
    assert list(stream) == []
    assert eventually(lambda: is_idle(client))
    with pytest.raises(RequestError, match="closed before"):
        stream.completion()


def test_a_stream_that_is_dropped_unread_cancels_and_frees(client: EngineClient, engine: Engine) -> None:
    gate = Gate(engine)
    EventStream(submit_to(client, [1, 2, 3], ENDLESS))
    gc.collect()
    gate.opened.set()
    assert eventually(lambda: is_idle(client))
    assert len(batch_sizes(engine)) <= 2


def test_a_handle_that_is_dropped_runs_on(client: EngineClient) -> None:
    events: list[TokenEvent] = []
    submit_to(client, [1, 2, 3], GREEDY, on_event=events.append)
    gc.collect()
    assert eventually(lambda: len(events) == 15)


def test_cancelling_is_honoured_within_one_step_and_keeps_what_was_said(client: EngineClient, engine: Engine) -> None:
    gate = Gate(engine)
    handle = submit_to(client, [1, 2, 3], ENDLESS)
    assert gate.entered.wait(10)
    handle.cancel()
    gate.opened.set()
    completion = handle.result(10)
    assert completion.finish_reason is FinishReason.CANCELLED
    assert len(completion.token_ids) == 1
    handle.cancel()  # of an ended request: nothing happens
    assert is_idle(client)


def test_a_waiting_request_can_be_cancelled() -> None:
    client = EngineClient(make_engine(slowly, num_blocks=50))  # of 4 tokens: one prompt fits beside no other
    running = submit_to(client, [1] * 150, GREEDY.replace(max_tokens=40))
    waiting = submit_to(client, [2] * 150, GREEDY)
    next(running)
    assert waiting.state is RequestState.WAITING
    waiting.cancel()
    assert waiting.result(10).token_ids == ()
    assert running.state is RequestState.RUNNING
    assert len(running.result(10).token_ids) == 40
    client.close()


def test_n_answers_come_as_one_result_and_as_events_of_each_choice(client: EngineClient) -> None:
    params = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=12, ignore_eos=True)
    handle = submit_to(client, [1, 2, 3, 4, 5, 6], params)
    events = list(handle)
    completion = handle.result()
    answers = [completion, *completion.alternatives]
    for choice, answer in enumerate(answers):
        assert [e.token_id for e in events if e.choice == choice] == list(answer.token_ids)
        assert answer.usage.completion_tokens == 12
    assert len({answer.token_ids for answer in answers}) == 4
    assert completion.token_ids == complete(make_engine(), [1, 2, 3, 4, 5, 6], params.replace(n=1)).token_ids
    assert eventually(lambda: is_idle(client))


def test_n_answers_are_cancelled_together(client: EngineClient) -> None:
    handle = submit_to(client, [1, 2, 3], ENDLESS.replace(n=3, max_tokens=60))
    next(handle)
    handle.cancel()
    completion = handle.result(10)
    assert {c.finish_reason for c in (completion, *completion.alternatives)} == {FinishReason.CANCELLED}
    assert eventually(lambda: is_idle(client))


def test_a_tenant_never_finds_what_another_has_computed(client: EngineClient) -> None:
    def cached(tenant: str) -> int:
        return submit_to(client, [1] * 40, GREEDY, tenant=tenant).result(10).usage.cached_tokens

    assert [cached("a"), cached("a"), cached("b")] == [0, 36, 0]


def test_a_refusal_is_raised_at_once_and_starts_nothing(client: EngineClient) -> None:
    with pytest.raises(InvalidParameter, match="vocabulary"):
        client.submit_all([Submission([1], GREEDY), Submission([999], GREEDY)], OutputCollector(), OutputCollector())
    assert is_idle(client)


def test_waiting_may_time_out_and_go_on(client: EngineClient, engine: Engine) -> None:
    gate = Gate(engine)
    handle = submit_to(client, [1, 2, 3], GREEDY)
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    gate.opened.set()
    assert len(handle.result(10).token_ids) == 15


def test_a_callback_may_submit_but_not_wait(client: EngineClient) -> None:
    found: list[Any] = []

    def on_event(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            found.append(submit_to(client, [5], GREEDY))
            with pytest.raises(RequestError, match="for ever"):
                found[0].result()
            found.append("refused")

    submit_to(client, [1], GREEDY, on_event=on_event)
    assert eventually(lambda: len(found) == 2)
    assert found[0].result(10).token_ids == complete(make_engine(), [5], GREEDY).token_ids


def test_work_runs_between_steps_once_there_is_room(client: EngineClient, engine: Engine) -> None:
    handle = submit_to(client, [1] * 100, GREEDY.replace(max_tokens=50))
    next(handle)
    blocks = client.compute(lambda engine: engine.kv.num_free, num_tokens=engine.kv.num_blocks * 4).result()
    assert blocks == engine.kv.num_blocks
    assert handle.state is RequestState.FINISHED
