"""Limits of a tier over a real socket: 429 with the numbers, refunds, and nothing left behind."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvarn.config import EngineConfig
from kvarn.server.access.keyfile import draw_key, write_keys
from kvarn.server.models.catalog import MemoryRoom, plan_load
from tests.chat_model import write_chat_model
from tests.server.edge_client import until
from tests.server.keyed import KeyedServer, chat_body, completion_body, events, running, tiny_keyed
from tests.server.process import SMOLLM2, ServerProcess
from tests.server.scraping import read, scrape

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("unchanged_keyed")]

LIMIT_HEADERS = ("x-ratelimit-limit-", "x-ratelimit-remaining-", "x-ratelimit-reset-")


def test_requests_a_minute_are_counted_down_and_then_refused(keyed: KeyedServer) -> None:
    for left in (2, 1, 0):
        response = keyed.chat("few_requests", "hi", max_tokens=1)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "3"
        assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        assert response.headers["x-ratelimit-reset-requests"].endswith("s")
    refused = keyed.chat("few_requests", "hi", max_tokens=1)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "few_requests" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert all(refused.headers[name + "requests"] for name in LIMIT_HEADERS)


def test_a_stream_carries_the_headers_too(keyed: KeyedServer) -> None:
    with keyed.client("alice") as client:
        body = chat_body("hi", max_tokens=1, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["x-ratelimit-limit-tokens"] == "100000000"


def test_the_headers_of_a_stream_count_all_that_it_may_take_and_those_after_it_what_it_took(keyed: KeyedServer) -> None:
    body = completion_body("One", max_tokens=60, stop=["e", " "])
    with keyed.client("streamer") as client:
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=streamed) as response:
            left = int(response.headers["x-ratelimit-remaining-tokens"])
            usage = [event["usage"] for event in events(response)][-1]
        assert left == 120 - usage["prompt_tokens"] - 60
        assert usage["completion_tokens"] < 60
        after = client.post("/v1/completions", json=body)
    used = usage["total_tokens"] + after.json()["usage"]["total_tokens"]
    assert int(after.headers["x-ratelimit-remaining-tokens"]) == 120 - used


def test_tokens_are_reserved_and_what_was_not_used_comes_back(keyed: KeyedServer) -> None:
    with keyed.client("few_tokens") as client:

        def ask(max_tokens: int) -> httpx.Response:
            return client.post("/v1/completions", json=completion_body("One", max_tokens=max_tokens, stop=["e", " "]))

        first = ask(100)
        assert first.status_code == 200
        used = first.json()["usage"]["total_tokens"]
        assert used < 60
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == 120 - used
        second = ask(50)  # fits only because the first gave back what it did not use
        assert second.status_code == 200
        used += second.json()["usage"]["total_tokens"]
        assert int(second.headers["x-ratelimit-remaining-tokens"]) == 120 - used
        refused = ask(118)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert all(refused.headers[name + "tokens"] for name in LIMIT_HEADERS)


def test_what_the_tier_could_never_allow_is_a_wrong_request(keyed: KeyedServer) -> None:
    refused = keyed.chat("few_tokens", "hi", max_tokens=500)
    assert refused.status_code == 400
    assert "120" in refused.json()["error"]["message"]


def test_n_answers_are_counted_before_any_is_begun(keyed: KeyedServer) -> None:
    refused = keyed.chat("few_tokens", "hi", max_tokens=30, n=8)
    assert refused.status_code == 400


def test_without_max_tokens_the_prompt_still_has_to_fit(keyed: KeyedServer) -> None:
    refused = keyed.chat("long_winded", "many words " * 100, max_tokens=None)
    assert refused.status_code == 400
    assert "the request may take" in refused.json()["error"]["message"]
    assert "120" in refused.json()["error"]["message"]


def test_without_max_tokens_all_answers_together_take_at_most_the_minute(keyed: KeyedServer) -> None:
    answered = keyed.chat("open_ended", "hi", max_tokens=None, n=3, ignore_eos=True)
    assert answered.status_code == 200
    assert 110 < answered.json()["usage"]["total_tokens"] <= 120
    assert {choice["finish_reason"] for choice in answered.json()["choices"]} == {"length"}
    assert keyed.chat("open_ended", "hi", max_tokens=None).status_code == 429


def test_four_chats_without_max_tokens_at_once_fit_where_two_contexts_do_not(tmp_path: Path) -> None:
    """Each may get 2,000 tokens long, and a minute has 4,000: they reserve what answers usually take."""
    tier = "[tiers.free]\ntokens_per_min = 4000\n"
    with tiny_keyed(tmp_path, config=tier) as server, ThreadPoolExecutor(4) as pool:
        with server.client("fred") as client:
            client.post("/fault/slow?seconds=0.01")  # so that they run at the same time
        body = {"model": "tiny.gguf", "messages": [{"role": "user", "content": "hi"}], "stop": ["a", "e", "i", "o"]}

        def ask(_: int) -> httpx.Response:
            with server.client("fred") as client:
                return client.post("/v1/chat/completions", json=body)

        answers = list(pool.map(ask, range(4)))
    assert [one.status_code for one in answers] == [200] * 4, [one.text for one in answers]


def test_who_comes_again_when_retry_after_says_is_served(tmp_path: Path) -> None:
    """What is missing is held by an answer that ends long before the minute does."""
    tier = "[tiers.free]\ntokens_per_min = 1200\n"
    with tiny_keyed(tmp_path, config=tier) as server, server.client("fred") as client:
        body = {"model": "tiny.gguf", "prompt": "ab", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            told = events(response)  # kept: httpx closes the connection with it
            next(told)
            other = {"model": "tiny.gguf", "prompt": "ab", "max_tokens": 600}
            refused = client.post("/v1/completions", json=other)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) <= 2
        time.sleep(int(refused.headers["retry-after"]))
        assert client.post("/v1/completions", json=other).status_code == 200


def test_a_cancelled_stream_gives_its_tokens_back(keyed: KeyedServer) -> None:
    with keyed.client("few_tokens_stream") as client:
        body = completion_body("One", max_tokens=110, stream=True, ignore_eos=True)
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            told = events(response)  # kept: httpx closes the connection with it
            next(told)
        _eventually(lambda: client.post("/v1/completions", json=completion_body("One", max_tokens=60)), 200)


def test_one_more_than_the_concurrency_is_refused_until_one_ends(keyed: KeyedServer) -> None:
    with keyed.client("one") as client, keyed.client("one") as other:
        body = chat_body("Count to a thousand.", max_tokens=400, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            told = events(response)  # kept: httpx closes the connection with it
            next(told)
            refused = other.post("/v1/chat/completions", json=chat_body("hi"))
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert "1 answers at once" in refused.json()["error"]["message"]
        # The client has gone away in the middle: its place is free again.
        _eventually(lambda: other.post("/v1/chat/completions", json=chat_body("hi", max_tokens=1)), 200)


def test_requests_that_are_refused_or_fail_hold_no_place(keyed: KeyedServer) -> None:
    with keyed.client("one") as client:
        for body in (chat_body("hi", max_tokens=10**6), chat_body("hi", logit_bias={"999999": 1}), {"model": "x"}):
            for _ in range(3):
                assert 400 <= client.post("/v1/chat/completions", json=body).status_code < 405
        assert client.post("/v1/chat/completions", json=chat_body("hi", max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("name", "wish", "given"), [("fred", 100, 0), ("fred", None, 0), ("fred", -5, -5), ("alice", 100, 20)]
)
def test_a_priority_above_the_tiers_is_lowered_not_refused(
    keyed: KeyedServer, name: str, wish: int | None, given: int
) -> None:
    body = completion_body("One", max_tokens=400, stream=True, ignore_eos=True, priority=wish)
    with keyed.client(name) as client, client.stream("POST", "/v1/completions", json=body) as response:
        told = events(response)  # kept: httpx closes the connection with it
        next(told)
        shown = client.get(f"/v1/requests/{response.headers['x-request-id']}").json()
    assert shown["priority"] == given


def test_a_place_is_taken_before_the_body_is_read(keyed: KeyedServer) -> None:
    """Else one key could fill the memory for bodies with uploads that never end."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {keyed.keys['one']}\r\n"
    rest = "content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", keyed.process.port)) as slow:
        slow.sendall((head + rest).encode())
        _eventually(lambda: keyed.chat("one", "hi", max_tokens=1), 429)
    _eventually(lambda: keyed.chat("one", "hi", max_tokens=1), 200)


def test_every_answer_takes_a_place(keyed: KeyedServer) -> None:
    refused = keyed.chat("one", "hi", max_tokens=1, n=2)
    assert refused.status_code == 400
    assert "wants 2 answers at once" in refused.json()["error"]["message"]
    assert keyed.chat("one", "hi", max_tokens=1).status_code == 200


def test_a_queue_full_of_free_requests_is_open_to_paid_ones(tmp_path: Path) -> None:
    settings = "queue_limit = 4\n[engine]\nmax_running = 1\n"
    with running(tmp_path, settings=settings) as keyed, keyed.client("fred") as client, ThreadPoolExecutor(4) as pool:
        runs = completion_body("One", max_tokens=800, ignore_eos=True, stream=True)
        waits = completion_body("One", max_tokens=20, ignore_eos=True)
        with client.stream("POST", "/v1/completions", json=runs) as response:
            told = events(response)  # kept: httpx closes the connection with it
            next(told)
            queue = [pool.submit(client.post, "/v1/completions", json=waits) for _ in range(4)]
            until(lambda: read(scrape(keyed.process), "kvarn_num_requests_waiting") == 4)
            left = _requests_left(client)
            refused = keyed.chat("fred", "hi", max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert int(refused.headers["x-ratelimit-remaining-requests"]) == left
            assert _requests_left(client) == left - 1  # the one that asked
            assert keyed.chat("alice", "hi", max_tokens=1).status_code == 200
        assert [one.result().status_code for one in queue] == [200] * 4


def test_refusals_are_counted_by_tier_and_reason(keyed: KeyedServer) -> None:
    keyed.chat("few_requests", "hi", max_tokens=1)
    with keyed.client(None) as client:
        lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if 'reason="requests",tier="few_requests"' in _sorted_labels(line)]
    assert line.startswith("kvarn_rate_limited_total")


def test_who_retries_when_told_finds_memory(tmp_path: Path) -> None:
    models = [str(write_chat_model(tmp_path / name)) for name in ("a.gguf", "b.gguf")]
    needed = plan_load("a.gguf", models[0], EngineConfig(), MemoryRoom(1 << 40, 1 << 40, True)).entry.needed_bytes
    arguments, config = ("--model", models[0], "--model", models[1]), f"memory_bytes = {needed * 3 // 2}\n"
    told_s = []
    with (
        ServerProcess(*arguments, config=config, module="tests.server.faulty") as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        for num_tokens in (30, 120):
            client.post("/fault/slow?seconds=0.05")
            body = {"model": "a.gguf", "prompt": "One", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                told = events(response)
                for _ in range(8):
                    next(told)
                reading = pool.submit(list, told)
                asked = {"model": "b.gguf", "prompt": "One", "max_tokens": 1}
                refused = client.post("/v1/completions", json=asked)
                assert refused.status_code == 429
                told_s.append(int(refused.headers["retry-after"]))
                time.sleep(told_s[-1])
                assert client.post("/v1/completions", json=asked).status_code == 200
                reading.result()
            assert client.post("/v1/completions", json=asked | {"model": "a.gguf"}).status_code == 200
    assert 1 <= told_s[0] < told_s[1] <= 15


def test_a_request_for_which_there_is_no_memory_counts_for_nothing_and_tells_what_is_left(tmp_path: Path) -> None:
    models = [str(write_chat_model(tmp_path / name)) for name in ("a.gguf", "b.gguf")]
    needed = plan_load("a.gguf", models[0], EngineConfig(), MemoryRoom(1 << 40, 1 << 40, True)).entry.needed_bytes
    key, entry = draw_key("pia", "pro")
    write_keys(tmp_path / "keys.toml", [entry])
    arguments = ("--model", models[0], "--model", models[1], "--keys", tmp_path / "keys.toml")
    config, headers = f"memory_bytes = {needed * 3 // 2}\n", {"authorization": f"Bearer {key}"}
    with (
        ServerProcess(*arguments, config=config, module="tests.server.faulty") as server,
        server.client(headers=headers) as client,
    ):
        client.post("/fault/slow?seconds=0.05")
        body = {"model": "a.gguf", "prompt": "One", "max_tokens": 800, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            told = events(response)  # kept: httpx closes the connection with it
            for _ in range(4):
                next(told)
            left = _requests_left(client, "a.gguf")
            refused = client.post("/v1/completions", json={"model": "b.gguf", "prompt": "One"})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 5  # some of the 40 s that the answer takes
            assert int(refused.headers["x-ratelimit-remaining-requests"]) == left
            assert _requests_left(client, "a.gguf") == left - 1  # the one that asked
        found = scrape(server)
    assert read(found, "kvarn_rate_limited_total", tier="pro", reason="memory") == 1
    assert read(found, "kvarn_rate_limited_total") == 1


def _requests_left(client: httpx.Client, model: str = SMOLLM2) -> int:
    """What is left to a key of its requests a minute, without this one."""
    asked = client.post("/tokenize", json={"model": model, "prompt": "a"})
    return int(asked.headers["x-ratelimit-remaining-requests"])


def _sorted_labels(line: str) -> str:
    labels = line.partition("{")[2].partition("}")[0]
    return ",".join(sorted(labels.split(",")))


def _eventually(ask: Callable[[], httpx.Response], status: int) -> None:
    """Ask until the status comes, for five seconds."""
    until = time.monotonic() + 5.0
    response = ask()
    while response.status_code != status and time.monotonic() < until:
        time.sleep(0.05)
        response = ask()
    assert response.status_code == status, response.text
