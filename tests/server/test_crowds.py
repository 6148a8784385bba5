"""A crowd of free keys that has texts embedded: whoever pays does not wait behind it, on any route that embeds."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.keyed import KeyedServer
from tests.server.process import MINILM

pytestmark = pytest.mark.model

CROWD = 12
SHEET = "a mill grinds grain into flour for bread and " * 24  # the model's whole context, so that a queue grows
NUM_ASKED = 9


class Crowd:
    """Free clients, each with one request in the queue at any time."""

    def __init__(self, keyed: KeyedServer) -> None:
        self.num_answered = 0
        self.is_over = False
        self._keyed = keyed
        self._threads = [threading.Thread(target=self._ask) for _ in range(CROWD)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        while self.num_answered < 2 * CROWD:
            threading.Event().wait(0.05)

    def end(self) -> None:
        self.is_over = True
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        with self._keyed.client("fred") as client:
            while not self.is_over:
                body = {"model": MINILM, "input": SHEET}  # one piece of work
                assert client.post("/v1/embeddings", json=body).status_code == 200
                self.num_answered += 1


@contextmanager
def a_crowd(keyed: KeyedServer) -> Iterator[Crowd]:
    crowd = Crowd(keyed)
    crowd.start()
    try:
        yield crowd
    finally:
        crowd.end()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": MINILM, "input": "flour"}),
        ("/v1/collections/mills/search", {"query": "flour", "mode": "dense"}),
    ],
)
def test_a_paid_text_is_embedded_before_those_of_a_free_crowd(
    keyed: KeyedServer, path: str, body: dict[str, Any]
) -> None:
    with keyed.client("alice") as client:
        client.post("/v1/collections", json={"name": "mills"})
        added = client.post("/v1/collections/mills/documents", json={"documents": [{"id": "m", "text": "A mill."}]})
        assert added.status_code == 200, added.text
        passed = []
        with a_crowd(keyed) as crowd:
            for number in range(NUM_ASKED):
                before = crowd.num_answered
                asked = body | {"query": f"flour {number}"} if "query" in body else body  # another one: none is cached
                assert client.post(path, json=asked).status_code == 200
                passed.append(crowd.num_answered - before)
        client.delete("/v1/collections/mills")
    assert statistics.median(passed) <= CROWD / 3  # in order of arrival it would be all of the crowd
