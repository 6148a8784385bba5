"""Many clients, faults, cancellations and clients that leave: every history must be explainable, token by token."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.conftest import Record, Size
from tests.server.history import Event, History, ask, inversions, misplaced_failures, violations
from tests.server.process import SMOLLM2, ServerProcess, model_path

SEED = 20
MIN_FAULTS = 3
PROMPTS = ("Once upon a time", "The capital of France", "def main():", "Dear Sir or Madam,", "1, 2, 3,")
NUM_BODIES = 8


def _good(text: str = "abc", reason: str = "length") -> History:
    """A history with nothing wrong."""
    history = History({})
    history.events = [
        Event("submit", 0.0),
        Event("accept", 0.1),
        *(Event("delta", 0.2, letter, 1) for letter in text),
        Event("finish", 0.4, reason),
        Event("usage", 0.5, num_tokens=len(text)),
        Event("end", 0.6),
    ]
    return history


def test_the_checker_accepts_what_is_right() -> None:
    assert violations(_good(), "abc") == []
    assert violations(_good("ab", "cancelled"), "abc") == []


@pytest.mark.parametrize(
    ("index", "events", "words"),
    [
        (5, [], "0 terminal events"),
        (5, [Event("finish", 0.4, "length"), Event("error", 0.4, "internal_error")], "2 terminal events"),
        (7, [Event("delta", 0.6, "d", 1), Event("end", 0.6)], "after the terminal event came delta"),
        (7, [], "ended 0 times"),
        (2, [Event("delta", 0.2, "x", 1)], "not the oracle's"),
        (2, [], "not the oracle's"),
        (6, [Event("usage", 0.5, num_tokens=4)], "usage [4] for 3 tokens"),
        (6, [], "no usage"),
        (6, [Event("usage", 0.5, num_tokens=3)] * 2, "2 times"),
        (2, [Event("cancel-ack", 0.2, num_tokens=1), Event("delta", 0.2, "a", 1)], "the cancellation was at 1"),
        (1, [], "neither accepted nor refused"),
        (1, [Event("refuse", 0.1, "overloaded")], "after a refusal"),
    ],
)
def test_the_checker_finds_what_is_wrong(index: int, events: list[Event], words: str) -> None:
    history = _good()
    history.events[index : index + 1] = events
    assert any(words in found for found in violations(history, "abc")), violations(history, "abc")


def _first_token(submitted_at: float, first_at: float | None) -> History:
    deltas = [] if first_at is None else [Event("delta", first_at, "a", 1)]
    return History({}, [Event("submit", submitted_at), *deltas])


def test_the_checker_finds_lower_priorities_that_were_served_first() -> None:
    lower = [_first_token(0.0, at) for at in (0.5, 1.5, 2.5, None)]
    assert inversions([_first_token(1.0, 3.0)], lower, max_overtaken=2) == []
    assert "2 lower ones" in inversions([_first_token(1.0, 3.0)], lower, max_overtaken=1)[0]
    assert len(inversions([_first_token(1.0, None)], lower, max_overtaken=1)) == 1
    assert inversions([_first_token(1.0, 1.2)], lower, max_overtaken=0) == []


def test_the_checker_finds_who_failed_for_another() -> None:
    failed, fine = _good(), _good()
    failed.events[5] = Event("error", 0.4, "internal_error")
    assert misplaced_failures(failed, is_at_fault=True) == misplaced_failures(fine, is_at_fault=False) == []
    assert "the fault of another" in misplaced_failures(failed, is_at_fault=False)[0]
    assert "did not fail" in misplaced_failures(fine, is_at_fault=True)[0]


@pytest.fixture(scope="module")
def faulty() -> Iterator[ServerProcess]:
    config = "[engine]\ncontext = 512\nmax_running = 8\n"
    with ServerProcess("--model", model_path(SMOLLM2), config=config, module="tests.server.faulty") as process:
        yield process


def _bodies() -> list[dict[str, Any]]:
    """Requests whose answers depend on nothing but themselves; logprobs tell how many tokens a chunk has."""
    draw = random.Random(SEED)
    return [
        {
            "model": SMOLLM2,
            "prompt": draw.choice(PROMPTS),
            "max_tokens": draw.randint(8, 24),
            "temperature": draw.choice([0.0, 0.8]),
            "seed": draw.randrange(2**40),
            "logprobs": 0,
            "ignore_eos": True,
        }
        for _ in range(NUM_BODIES)
    ]


def _as_stream(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


class Client:
    """Asks one request after another until there were faults enough, each in its own way, and keeps the histories."""

    def __init__(self, server: ServerProcess, number: int, num_requests: int) -> None:
        self._server = server
        self._draw = random.Random(SEED + number)
        self._num_requests = num_requests

    def run(self, bodies: list[dict[str, Any]], enough: threading.Event | None = None) -> list[tuple[int, History]]:
        kept: list[tuple[int, History]] = []
        with self._server.client() as http:
            while len(kept) < self._num_requests or (enough and not enough.is_set()):
                index = self._draw.randrange(len(bodies))
                kept.append((index, self._ask(http, bodies[index])))
        return kept

    def _ask(self, http: httpx.Client, body: dict[str, Any]) -> History:
        manner = self._draw.choice(["whole", "stream", "stream", "cancel", "cancel", "leave"])
        if manner == "whole":
            return ask(http, body)
        plan = [(self._draw.randint(1, 12), manner)] if manner != "stream" else []
        return ask(http, _as_stream(body), plan)


def _inject(server: ServerProcess, over: threading.Event, enough: threading.Event) -> int:
    """Break a pass now and then; two in a row also break the first request's second chance."""
    draw = random.Random(SEED)
    num_faults = 0
    try:
        with server.client() as http:
            while not over.wait(draw.uniform(0.1, 0.6)):
                kind, step, count = draw.choice(["raise", "nan"]), draw.randint(1, 6), draw.choice([1, 2, 2, 3])
                assert http.post(f"/fault/{kind}?step={step}&count={count}").status_code == 200
                num_faults += 1
                if num_faults > MIN_FAULTS:  # all but the last had time to be met
                    enough.set()
    finally:
        enough.set()
    return num_faults


@pytest.mark.model
def test_every_history_under_faults_is_explained_by_the_oracle(
    faulty: ServerProcess, size: Size, patience: float, record: Record
) -> None:
    bodies = _bodies()
    with faulty.client() as http:
        alone = [ask(http, body) for body in bodies]
        before = http.get("/fault/state").json()
    oracle = [history.text for history in alone]
    assert [found for history, text in zip(alone, oracle, strict=True) for found in violations(history, text)] == []

    num_clients, num_requests = size(6, 16), size(6, 60)
    over, enough = threading.Event(), threading.Event()
    with ThreadPoolExecutor(num_clients + 1) as threads:
        faults = threads.submit(_inject, faulty, over, enough)
        asked = [Client(faulty, number, num_requests).run for number in range(num_clients)]
        clients = [threads.submit(run, bodies, enough) for run in asked]
        try:
            kept = [one for client in clients for one in client.result()]
        finally:
            over.set()
        num_faults = faults.result()

    wrong = [(oracle[index], found, history) for index, history in kept for found in violations(history, oracle[index])]
    assert not wrong, wrong[:3]
    ends = Counter(
        event.text if event.kind == "finish" else event.kind
        for _, history in kept
        for event in history.of("finish", "error", "leave", "refuse")
    )
    record("server-history", {"clients": num_clients, "requests": len(kept), "faults": num_faults, "ends": dict(ends)})
    assert len(kept) >= num_clients * num_requests
    assert num_faults > MIN_FAULTS
    assert ends["refuse"] == 0
    assert ends["error"] >= 1, "some faults must have hit a request"
    assert ends["cancelled"] >= 1
    assert ends["leave"] >= 1
    _check_nothing_is_left(faulty, before, patience)


@pytest.mark.model
@pytest.mark.parametrize("what", ["text", "scores"])
def test_a_token_that_cannot_be_read_fails_the_answers_that_have_it_and_no_others(
    faulty: ServerProcess, what: str, size: Size, patience: float
) -> None:
    """what: the text is read by the engine, the scores are written by the server."""
    bodies = _bodies()
    with faulty.client() as http:
        http.post("/fault/slow?seconds=0")  # no fault of another test is left over
        answers = [http.post("/v1/completions", json=body).json()["choices"][0] for body in bodies]
        before = http.get("/fault/state").json()
        token, owners = _telling_token([answer["logprobs"]["tokens"] for answer in answers])
        (token_id,) = http.post("/tokenize", json={"prompt": token, "add_special_tokens": False}).json()["tokens"]
        assert http.post(f"/fault/unreadable?token={token_id}&where={what}").status_code == 200
    try:
        with ThreadPoolExecutor(6) as threads:
            clients = [threads.submit(Client(faulty, number, size(6, 30)).run, bodies) for number in range(6)]
            kept = [one for client in clients for one in client.result()]
    finally:
        with faulty.client() as http:
            http.post("/fault/unreadable?token=-1&where=text")
    wrong = [
        (found, history)
        for index, history in kept
        for found in [
            *violations(history, answers[index]["text"]),
            *misplaced_failures(history, is_at_fault=index in owners),
        ]
    ]
    assert not wrong, wrong[:3]
    assert {index for index, history in kept if history.of("error")} <= owners
    assert any(history.of("error") for _, history in kept)
    assert any(history.of("finish") and index not in owners for index, history in kept)
    _check_nothing_is_left(faulty, before, patience)


def _telling_token(answers: Sequence[Sequence[str]]) -> tuple[str, set[int]]:
    """A token of plain letters that some of the answers have and others do not, and which have it."""
    for token in sorted({token for answer in answers for token in answer if token.strip().isalpha()}):
        owners = {index for index, answer in enumerate(answers) if token in answer}
        if 0 < len(owners) < len(answers):
            return token, owners
    raise AssertionError("all answers have the same tokens")


def _check_nothing_is_left(server: ServerProcess, before: Mapping[str, int], patience: float) -> None:
    """Requests, generations, blocks and tasks return to where they were."""
    names = ("http_requests", "generations", "running", "waiting", "blocks_used", "tasks")
    ends_at = time.monotonic() + 5.0 * patience
    with server.client() as http:
        while True:
            now = http.get("/fault/state").json()
            left = {name: (before[name], now[name]) for name in names if now[name] > before[name]}
            if not left:
                return
            assert time.monotonic() < ends_at, left
            time.sleep(0.1)
