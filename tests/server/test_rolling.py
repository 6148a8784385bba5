"""Two replicas are replaced one after the other under load, and no request fails: what a drain is for.

The clients' side is as small as a cluster's: a list of replicas that say they are ready, looked at now and then.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import pytest

from tests.server.process import SMOLLM2, ServerProcess, model_path

pytestmark = pytest.mark.model

NUM_CLIENTS = 4
LOOK_EVERY_S = 0.1
DRAIN = ("--drain-delay", "1.0", "--drain-timeout", "20")
BODY = {"model": SMOLLM2, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Cluster:
    """Replicas, and which of them are in service."""

    def __init__(self) -> None:
        self.is_over = False
        self.in_service: list[ServerProcess] = []
        self._replicas: list[ServerProcess] = []
        self._turn = itertools.count()

    def add(self) -> ServerProcess:
        replica = ServerProcess("--model", model_path(SMOLLM2), "--context", "256", *DRAIN)
        replica.start()
        self._replicas = [*self._replicas, replica]
        while replica not in self.in_service:
            time.sleep(LOOK_EVERY_S)
        return replica

    def replace(self, old: ServerProcess) -> None:
        """As a rolling update does: the new one is in service before the old one is told to end."""
        self.add()
        assert old.stop() == 0
        self._replicas = [replica for replica in self._replicas if replica is not old]

    def look(self) -> None:
        while not self.is_over:
            self.in_service = [replica for replica in self._replicas if _is_ready(replica)]
            time.sleep(LOOK_EVERY_S)

    def keep_asking(self) -> list[str]:
        """The texts that came; 503 is the only answer after which a client asks again."""
        texts: list[str] = []
        while not self.is_over:
            replicas = self.in_service
            with replicas[next(self._turn) % len(replicas)].client() as client:
                response = client.post("/v1/completions", json=BODY)
            if response.status_code != 503:
                assert response.status_code == 200, response.text
                texts.append(response.json()["choices"][0]["text"])
        return texts

    def close(self) -> None:
        self.is_over = True
        for replica in self._replicas:
            replica.__exit__(None, None, None)


def _is_ready(replica: ServerProcess) -> bool:
    with suppress(httpx.HTTPError), replica.client() as client:
        return client.get("/health/ready").status_code == 200
    return False


@contextmanager
def two_replicas() -> Iterator[Cluster]:
    cluster = Cluster()
    threading.Thread(target=cluster.look, daemon=True).start()
    try:
        cluster.add()
        cluster.add()
        yield cluster
    finally:
        cluster.close()


def test_a_rolling_restart_under_load_fails_no_request() -> None:
    with two_replicas() as cluster, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        first, second = cluster.in_service
        clients = [pool.submit(cluster.keep_asking) for _ in range(NUM_CLIENTS)]
        try:
            for replica in (first, second):
                time.sleep(1.0)
                cluster.replace(replica)
            time.sleep(1.0)
        finally:
            cluster.is_over = True
        texts = [text for client in clients for text in client.result()]
    assert len(texts) > 2 * NUM_CLIENTS
    assert len(set(texts)) == 1  # the same request, the same bytes, whoever answers
