"""Many free keys that embed texts: a paid request does not wait behind them, on any route that embeds."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.server.edge_client import until
from tests.server.keyed import KeyedServer, completion_body
from tests.server.process import MINILM

pytestmark = pytest.mark.model

CROWD = 12
CONCURRENCY = 16  # of a free key
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


@contextmanager
def a_flood_of_documents(keyed: KeyedServer) -> Iterator[None]:
    """More free requests that wait for embeddings than the server has threads of any kind."""
    keys = [keyed.add(f"flooding-{number}", "free") for number in range(5)]
    heads = [{"authorization": f"Bearer {key}", "content-type": "application/json"} for key in keys]
    connections = []
    try:
        for head in heads:
            until(partial(_has_begun, keyed, head))  # the keys are new
        for number in range(CONCURRENCY * len(keys)):
            documents = [{"id": f"{number}-{page}", "text": f"{number} {page} {SHEET}"} for page in range(16)]
            head = heads[number % len(heads)]
            connections.append(_sent(keyed, head, "/v1/collections/flood/documents", {"documents": documents}))
        yield
    finally:
        for connection in connections:
            connection.close()
        for number in range(5):
            keyed.remove(f"flooding-{number}")


def _has_begun(keyed: KeyedServer, head: dict[str, str]) -> bool:
    with closing(_sent(keyed, head, "/v1/collections", {"name": "flood"})) as connection:
        return connection.getresponse().status == 200


def _sent(keyed: KeyedServer, head: dict[str, str], path: str, body: dict[str, Any]) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", keyed.process.port, timeout=60)
    connection.request("POST", path, json.dumps(body), head)
    return connection


def test_paid_requests_pass_a_flood_of_free_documents(keyed: KeyedServer, patience: float) -> None:
    with keyed.client("alice") as client:
        client.post("/v1/collections", json={"name": "mills"})
        client.post("/v1/collections/mills/documents", json={"documents": [{"id": "m", "text": "A mill."}]})
        with a_flood_of_documents(keyed):
            until(lambda: client.get("/fault/state").json()["http_requests"] >= 4 * CONCURRENCY)
            asked = [
                ("/v1/completions", completion_body("A mill", max_tokens=1)),
                ("/v1/collections/mills/search", {"query": "flour", "mode": "dense"}),
            ]
            for path, body in asked:
                began = time.monotonic()
                assert client.post(path, json=body).status_code == 200
                assert time.monotonic() - began < 1.5 * patience
        client.delete("/v1/collections/mills")
        until(lambda: client.get("/fault/state").json()["http_requests"] == 0)
