"""Thirty long prompts of one tier beside a client of a higher one: its first tokens come as if it were alone."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.conftest import Record
from tests.server.history import History, ask, inversions
from tests.server.keyed import KeyedServer, completion_body

pytestmark = pytest.mark.model

NUM_WORDS, PRO_TOKENS = 300, 8
MAX_FACTOR = 2.0  # of the time to the first token alone
MAX_OVERTAKEN = 3  # prompts of 300 words whose last rows lie in the step that is under way
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box"]
_numbers = itertools.count()


def prompt_of(num_words: int) -> str:
    """A prompt that shares no prefix with any other."""
    number = next(_numbers)
    return f"{number} " + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(num_words))


class ProClients:
    """Clients of the lower tier that ask again as soon as they are answered."""

    def __init__(self, keyed: KeyedServer, number: int) -> None:
        self.histories: list[History] = []
        self._keyed = keyed
        self._number = number
        self._is_over = threading.Event()
        self._have_begun = threading.Semaphore(0)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(self._number) as threads:
            clients = [threads.submit(self._run) for _ in range(self._number)]
            for _ in range(self._number):
                assert self._have_begun.acquire(timeout=60)
            try:
                yield
            finally:
                self._is_over.set()
            for client in clients:
                client.result()

    def _run(self) -> None:
        with self._keyed.client("alice") as http:
            self._have_begun.release()
            while not self._is_over.is_set():
                body = completion_body(prompt_of(NUM_WORDS), max_tokens=PRO_TOKENS, stream=True, ignore_eos=True)
                history = ask(http, body)
                assert history.of("finish"), history
                self.histories.append(history)


def ask_in_turn(http: httpx.Client, number: int, num_words: int) -> list[History]:
    """Sequential requests of the higher tier."""
    bodies = [completion_body(prompt_of(num_words), max_tokens=4, stream=True, ignore_eos=True) for _ in range(number)]
    return [ask(http, body) for body in bodies]


def first_tokens(histories: list[History]) -> list[float]:
    return [until - since for since, until in (history.waited for history in histories)]


def p95(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.95 * len(times)))]


def test_no_long_prompt_of_a_lower_tier_overtakes_a_higher_one(keyed: KeyedServer) -> None:
    pro = ProClients(keyed, 8)
    with keyed.client("boss") as http:
        ask_in_turn(http, 1, 60)  # from now on the server knows that there is such a tier
        with pro.running():
            higher = ask_in_turn(http, 5, 60)
    assert inversions(higher, pro.histories, MAX_OVERTAKEN) == []
    assert len(pro.histories) >= 8  # they were answered, too


@pytest.mark.long
@pytest.mark.parametrize("num_words", [60, NUM_WORDS])
def test_thirty_long_prompts_of_a_lower_tier_hardly_delay_a_higher_one(
    keyed: KeyedServer, record: Record, num_words: int
) -> None:
    pro = ProClients(keyed, 30)
    with keyed.client("boss") as http:
        ask_in_turn(http, 2, num_words)
        alone = first_tokens(ask_in_turn(http, 50, num_words))
        with pro.running():
            higher = ask_in_turn(http, 50, num_words)
    beside = first_tokens(higher)
    figures = {
        "alone_p50_ms": 1000 * statistics.median(alone),
        "alone_p95_ms": 1000 * p95(alone),
        "beside_p50_ms": 1000 * statistics.median(beside),
        "beside_p95_ms": 1000 * p95(beside),
        "pro_answers": len(pro.histories),
    }
    print(json.dumps(figures, indent=1))
    record(f"priority-{num_words}-words", figures)
    assert inversions(higher, pro.histories, MAX_OVERTAKEN) == []
    assert p95(beside) <= MAX_FACTOR * p95(alone)
