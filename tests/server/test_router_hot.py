"""A router before a replica that others keep busy: what it holds is asked elsewhere, what the others hold is not."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx

from tests.server.process import ServerProcess
from tests.server.routed import CHAT, REPLICA, RouterProcess, body, cluster

SETTLE_S = 0.2  # ten times as long as a replica takes to tell what it holds
NUM_TALKS = 8  # in turn to both replicas, which are as busy as each other
CHOICES = 16  # of one request: so many answers run
LENGTHS = (40, 60, 80, 100)  # of answers, which end one after the other and fit into the cache beside the conversations
LOAD = 1500  # tokens, more than computing one of the prompts below twice


def test_one_hot_replica_loses_its_conversations_and_the_other_keeps_its_own(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as both, both.router.client() as client:

        def ask(number: int) -> tuple[str, int]:
            words = f"{number}{number} long words " * 16
            answer = client.post(CHAT, json=body(f"Conversation {number}. {words}"))
            return answer.headers[REPLICA], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        talks = {ask(number)[0]: number for number in range(NUM_TALKS)}
        time.sleep(SETTLE_S)
        assert {home: ask(number)[0] for home, number in talks.items()} == {"0": "0", "1": "1"}
        is_over = threading.Event()
        askers = [threading.Thread(target=_keep_busy, args=(both.replicas[0], length, is_over)) for length in LENGTHS]
        for one in askers:
            one.start()
        try:
            _until_loaded(both.router, both.replicas[0].url)
            found = {home: ask(number) for home, number in talks.items()}
        finally:
            is_over.set()
            for one in askers:
                one.join()
        assert both.router.metric("kvarn_router_prefix_tokens_passed_total") > 100  # it lay there, and was passed
    assert found["0"][0] == "1"
    assert found["1"][0] == "1"
    assert found["1"][1] > 100


def _keep_busy(server: ServerProcess, length: int, is_over: threading.Event) -> None:
    """Answers that the router knows of by what the replica tells alone."""
    asked = body("Go on.", max_tokens=length, n=CHOICES, stream=True, ignore_eos=True)
    with server.client() as client:
        while not is_over.is_set():
            with client.stream("POST", CHAT, json=asked) as stream:
                assert stream.status_code == 200, stream.read()
                for _ in stream.iter_raw():
                    if is_over.is_set():
                        break


def _until_loaded(router: RouterProcess, url: str) -> None:
    """Wait until the router sees the load of a replica."""
    start = f'kvarn_router_replica_load_tokens{{replica="{url}"}} '
    until = time.monotonic() + 30
    while time.monotonic() < until:
        lines = httpx.get(router.url + "/metrics", trust_env=False).text.splitlines()
        (load,) = [float(line.removeprefix(start)) for line in lines if line.startswith(start)]
        if load > LOAD:
            return
        time.sleep(0.02)
    raise AssertionError(f"{url} was never loaded: {router.log[-2000:]}")
