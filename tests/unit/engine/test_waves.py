"""More prompts than the queue holds: all are answered, checked before one starts, and none is left behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.handle import RequestHandle
from kvarn.engine.submission import Submission
from kvarn.errors import CapacityError, InvalidParameter, KvarnError
from kvarn.types import Completion, SamplingParams
from tests.unit.engine.fake import expected, make_engine
from tests.unit.engine.stepping import ENDLESS, batch_sizes, eventually, is_idle

SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def submissions(count: int, params: SamplingParams = SHORT) -> list[Submission]:
    return [Submission([i % 200, i // 200, 7], params) for i in range(count)]


@pytest.mark.parametrize("n", [1, 3])
def test_more_prompts_than_the_queue_holds_are_all_answered(n: int) -> None:
    client = EngineClient(make_engine(queue_limit=8, max_running=3))
    asked = submissions(60, SHORT.replace(n=n))
    found = client.complete(asked)
    assert [list(one.token_ids) for one in found] == [expected(one.prompt_ids, 3) for one in asked]
    assert [len(one.alternatives) for one in found] == [n - 1] * 60
    assert is_idle(client)
    client.close()


def test_one_wrong_prompt_at_the_end_keeps_all_from_starting() -> None:
    engine = make_engine(queue_limit=8)
    client = EngineClient(engine)
    with pytest.raises(InvalidParameter):
        client.complete([*submissions(30), Submission([10**6], SHORT)])
    assert batch_sizes(engine) == []
    client.close()


def test_an_engine_that_closes_fails_also_what_was_not_submitted_yet() -> None:
    client = EngineClient(make_engine(queue_limit=8, max_running=2))
    closing = threading.Timer(0.1, client.close)
    closing.start()
    with pytest.raises(KvarnError):
        client.complete(submissions(2000, ENDLESS))
    closing.join()


def test_an_interrupted_wait_submits_nothing_more() -> None:
    client = EngineClient(make_engine(queue_limit=8, max_running=2))

    def interrupted(_: Sequence[Future[Completion]]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.complete(submissions(50, ENDLESS), interrupted)
    eventually(lambda: is_idle(client))
    client.close()


@pytest.mark.parametrize("n", [1, 2])
def test_what_a_used_up_rate_refuses_in_the_middle_is_answered_later(n: int) -> None:
    client = EngineClient(make_engine(queue_limit=8, max_running=2, requests_per_s=100.0, window_s=0.1))
    asked = submissions(25, SHORT.replace(n=n))
    found = client.complete(asked)
    assert [list(one.token_ids) for one in found] == [expected(one.prompt_ids, 3) for one in asked]
    assert [len(one.alternatives) for one in found] == [n - 1] * 25
    assert is_idle(client)
    client.close()


def test_what_finds_the_queue_full_of_others_in_the_middle_is_answered_later() -> None:
    engine = make_engine(queue_limit=4, max_running=1)
    client = EngineClient(engine)
    others: list[RequestHandle] = []

    def fill(tokens: Sequence[int]) -> int:  # on the engine's thread: the queue is full when the first answer ends
        while len(others) < 4:
            others.append(client.submit(Submission([9, 9, 9, len(others)], SHORT)))
        return rule(tokens)

    rule, engine.backend.rule = engine.backend.rule, fill  # type: ignore[attr-defined]
    asked = submissions(3)
    found = client.complete(asked)
    assert len(others) == 4
    assert [list(one.token_ids) for one in found] == [expected(one.prompt_ids, 3) for one in asked]
    assert [one.result().usage.completion_tokens for one in others] == [3] * 4
    client.close()


def test_an_engine_that_drains_takes_nothing_more_of_what_was_refused() -> None:
    client = EngineClient(make_engine(queue_limit=8, max_running=2, requests_per_s=4.0, window_s=0.5))
    draining = threading.Timer(0.1, client.drain)
    draining.start()
    with pytest.raises(CapacityError):
        client.complete(submissions(25))
    draining.join()
    client.close()
