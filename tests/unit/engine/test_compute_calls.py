"""Pieces of work that compute, such as embeddings: the most urgent first, one between two steps, nobody forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.errors import BackendError, RequestError
from tests.submitting import submit_to
from tests.unit.engine.fake import make_engine
from tests.unit.engine.stepping import ENDLESS, batch_sizes, eventually


@contextmanager
def held(client: EngineClient) -> Iterator[None]:
    """The engine's thread waits inside a piece of work meanwhile."""
    entered, opened = threading.Event(), threading.Event()
    client.call(lambda _: (entered.set(), opened.wait(30)))
    assert entered.wait(10)
    try:
        yield
    finally:
        opened.set()


def test_higher_priorities_go_first_and_equals_in_the_order_they_came(client: EngineClient) -> None:
    served: list[str] = []
    works = []
    with held(client):
        for name in ("free 1", "free 2", "paid 1", "free 3", "paid 2"):
            priority = 20 if "paid" in name else 0
            works.append(client.compute(lambda _, name=name: served.append(name), priority=priority))
    for work in works:
        work.result(10)
    assert served == ["paid 1", "paid 2", "free 1", "free 2", "free 3"]


def test_work_ages_as_requests_do() -> None:
    client = EngineClient(make_engine(ageing_s=0.001))
    served: list[str] = []
    with held(client):
        old = client.compute(lambda _: served.append("old"))
        time.sleep(0.1)
        young = client.compute(lambda _: served.append("young"), priority=20)  # worth 0.02 s of waiting
    old.result(10)
    young.result(10)
    assert served == ["old", "young"]
    client.close()


def test_one_piece_of_work_is_done_between_two_steps(client: EngineClient, engine: Engine) -> None:
    """A crowd of embeddings must not hold up those who are being answered."""
    seen: list[int] = []
    with held(client):
        asking = threading.Thread(target=lambda: submit_to(client, [1], ENDLESS).result(30))
        asking.start()
        works = [client.compute(lambda _: seen.append(len(batch_sizes(engine)))) for _ in range(5)]
        assert eventually(lambda: client._thread._inbox.qsize() >= 6)
    for work in works:
        work.result(10)
    asking.join(30)
    assert [after - before for before, after in pairwise(seen)] == [1] * 4


def test_work_that_was_cancelled_is_not_done(client: EngineClient) -> None:
    done: list[int] = []
    with held(client):
        works = [client.compute(lambda _, number=number: done.append(number)) for number in range(3)]
        assert works[1].cancel()
    works[2].result(10)
    assert done == [0, 2]


@pytest.mark.parametrize("ends", ["stuck", "closed"])
def test_nobody_waits_for_an_engine_that_does_not_answer_any_more(ends: str) -> None:
    client = EngineClient(make_engine(), step_timeout_s=0.2 if ends == "stuck" else 60)
    entered, opened = threading.Event(), threading.Event()

    def hang(_: Engine) -> None:
        entered.set()
        opened.wait(30)

    with held(client):
        hung, *waiting = [client.compute(hang), client.compute(lambda _: None), client.compute(lambda _: None)]
    assert entered.wait(10)  # the others have been put aside by now
    if ends == "closed":
        threading.Timer(0.1, opened.set).start()
        client.close()
        hung.result(10)
    for work in waiting:
        with pytest.raises(RequestError if ends == "closed" else BackendError):
            work.result(10)
    opened.set()
    if ends == "stuck":
        assert eventually(lambda: client.compute(lambda _: None).exception(10) is None)
        client.close()
