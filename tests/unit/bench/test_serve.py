"""The load generator against a server whose every byte is known: what it counts, and that it ends."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from kvarn.bench.connection import Address, Connection, Exchange
from kvarn.bench.serve import Load, Prompts, run_load, spread
from kvarn.errors import ConfigError, RequestError
from tests.unit.bench.canned import (
    HANG_UP,
    MODELS,
    Answer,
    CannedServer,
    chunk,
    ended,
    event,
    refused,
    reply,
    said,
    stream_head,
)

COMMENT = chunk(b": 40% of the prompt\n\n")


def good(*pauses: float) -> list[bytes | float]:
    """Three events with text, counted by the server as seven tokens of a prompt of nine."""
    first, second = pauses or (0.0, 0.0)
    return [stream_head(), COMMENT, first, said("one"), second, said(" two"), said(" three"), *ended(9, 7)]


def run(server: CannedServer, **options: Any) -> dict[str, Any]:
    return asyncio.run(run_load(Load(server.url, "m", **{"num_requests": 4, "concurrency": 2, **options})))


def test_tokens_come_from_usage_and_times_from_the_events() -> None:
    with CannedServer(lambda *_: good(0.05, 0.1)) as server:
        report = run(server)
    assert (report["requests"], report["succeeded"], report["failed"], report["refused_429"]) == (4, 4, 0, 0)
    assert (report["prompt_tokens"], report["completion_tokens"]) == (36, 28)
    # An event may be read late, which makes the gap after it shorter: only times since the request are certain.
    first, gaps, mean_gap = (report[name] for name in ("first_token_ms", "inter_token_ms", "token_time_ms"))
    rounding = 0.1
    assert first["p50"] >= 50 - rounding
    assert first["max"] + gaps["max"] >= 150 - rounding
    assert gaps["p50"] < gaps["max"]  # half of the gaps are none
    assert first["mean"] + 6 * mean_gap["mean"] >= 150 - rounding
    assert report["request_ms"]["p50"] >= 150 - rounding
    assert report["tokens_per_s"] == pytest.approx(28 / report["seconds"], rel=0.01)


def test_what_is_asked_is_a_streamed_chat_with_usage_and_the_key() -> None:
    with CannedServer(lambda *_: good()) as server:
        run(server, api_key="sk-1", max_tokens=5, ignores_end=True, shared_prefix=3, prompt_tokens=2)
        bodies = server.bodies()
        assert all(b"authorization: Bearer sk-1\r\n" in request for request in server.requests)
    assert bodies[0].keys() >= {"model", "messages", "max_tokens", "stream", "stream_options", "ignore_eos"}
    prompts = [body["messages"][0]["content"].split() for body in bodies]
    assert {len(words) for words in prompts} == {5}
    assert len({tuple(words[:3]) for words in prompts}) == 1
    assert len({tuple(words[3:]) for words in prompts}) > 1


def test_connections_are_used_again() -> None:
    with CannedServer(lambda *_: good()) as server:
        report = run(server, num_requests=40, concurrency=2)
    assert report["succeeded"] == 40
    assert server.num_connections == 2


def test_refusals_with_429_are_counted_apart_and_waited_out() -> None:
    def answer(number: int, _: bytes) -> Answer:
        return [refused(429, "too many", "retry-after: 1")] if number == 0 else good()

    with CannedServer(answer) as server:
        report = run(server, concurrency=1, num_requests=2)
        assert server.times[1] - server.times[0] >= 0.9
    assert (report["succeeded"], report["refused_429"], report["failed"]) == (1, 1, 0)
    assert report["example"] == "429: too many"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ([refused(500, "broken")], "status 500"),
        ([b"HTTP/1.1 502 X\r\ncontent-length: 4\r\n\r\nhtml"], "status 502"),
        (
            [stream_head(), said("a"), event({"error": {"message": "boom"}}), event("[DONE]"), b"0\r\n\r\n"],
            "error in the stream",
        ),
        ([stream_head(), said("a"), b"0\r\n\r\n"], "incomplete stream"),
        ([stream_head(), *ended(3, 0)], "incomplete stream"),
        ([stream_head(), said("a"), HANG_UP], "connection"),
        ([b"SMTP ready\r\n\r\n"], "connection"),
        ([30.0], "timeout"),
    ],
    ids=["500", "502", "error", "no DONE", "no text", "hang up", "not HTTP", "silence"],
)
def test_failures_are_counted_by_kind(answer: Answer, kind: str) -> None:
    with CannedServer(lambda *_: answer) as server:
        report = run(server, num_requests=2, concurrency=1, timeout_s=0.4)
    assert report["failures"] == {kind: 2}
    assert (report["succeeded"], report["failed"]) == (0, 2)
    assert report["example"].startswith(kind)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(RequestError, match=f"{address} did not answer: .*; is a server running there"):
        asyncio.run(run_load(Load(f"http://{address}", None, num_requests=1)))


def test_the_same_bytes_in_any_pieces_count_the_same() -> None:
    whole = b"".join(part for part in good() if isinstance(part, bytes))
    rng = random.Random(5)

    async def read(pieces: list[bytes]) -> Exchange:
        with CannedServer(lambda *_: [part for piece in pieces for part in (piece, 0.0005)]) as server:
            connection = await Connection.open(Address.of(server.url))
            return await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", 10.0)

    for _ in range(10):
        cuts = sorted(rng.sample(range(1, len(whole)), 12))
        pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        exchange = asyncio.run(read(pieces))
        assert (exchange.num_events, exchange.is_done, exchange.usage) == (
            3,
            True,
            {"prompt_tokens": 9, "completion_tokens": 7},
        )


def test_a_rate_spreads_the_starts_evenly() -> None:
    with CannedServer(lambda *_: good()) as server:
        run(server, num_requests=6, concurrency=6, rate=20.0)
        assert server.times[-1] - server.times[0] >= 0.2


def test_a_duration_ends_the_run_and_what_has_begun_is_finished(patience: float) -> None:
    with CannedServer(lambda *_: good(0.0, 0.3)) as server:
        started = time.monotonic()
        report = run(server, num_requests=None, seconds=0.5, concurrency=3)
        assert time.monotonic() - started < 0.5 + 1.0 * patience
    assert report["succeeded"] == report["requests"] == len(server.requests) >= 3


def test_prompts_are_the_same_for_the_same_seed_and_differ_between_numbers() -> None:
    load = Load("http://x", "m", num_requests=1, shared_prefix=20, prompt_tokens=30)
    prompts = [Prompts(load).make(number) for number in (0, 1, 0)]
    assert prompts[0] == prompts[2] != prompts[1]
    assert prompts[0].split()[:20] == prompts[1].split()[:20]
    assert len(prompts[0].split()) == 50


def test_percentiles_are_values_that_occurred() -> None:
    found = spread([second / 1000 for second in range(1, 101)])
    assert found == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert spread([]) is None
    assert spread([0.002]) == dict.fromkeys(["mean", "p50", "p90", "p95", "p99", "max"], 2.0)


@pytest.mark.parametrize(
    "options",
    [
        {"num_requests": None},
        {"seconds": 1.0},
        {"concurrency": 0},
        {"concurrency": 100_000},
        {"max_tokens": 0},
        {"rate": -1.0},
        {"url": "ftp://x"},
        {"url": "http://x:99999"},
        {"url": "http://user:secret@x"},
    ],
    ids=str,
)
def test_a_load_without_bounds_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Load(**{"url": "http://x", "num_requests": 1, **options})


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_base_url_may_end_as_clients_of_openai_write_it(suffix: str) -> None:
    assert Address.of(f"http://127.0.0.1:81{suffix}") == Address("127.0.0.1", 81, "", False)
    assert Address.of(f"https://a.example/proxy{suffix}") == Address("a.example", 443, "/proxy", True)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvarn.cli.main", "bench", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_a_table_and_then_one_line_of_json() -> None:
    def answer(_: int, request: bytes) -> Answer:
        return [reply(200, MODELS)] if request.startswith(b"GET /v1/models ") else good()

    with CannedServer(answer) as server:
        done = bench("--url", f"{server.url}/v1", "--requests", "3", "-c", "2", "-n", "4")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert json.loads(last)["succeeded"] == 3
    assert json.loads(last)["model"] == "m"  # the first that the server lists
    assert "3 answers, 0 refused with 429, 0 failed" in table[1]
    assert any(line.startswith("first token") for line in table)


def test_the_command_fails_when_no_request_succeeded() -> None:
    with CannedServer(lambda *_: [refused(401, "no key")]) as server:
        done = bench("--url", server.url, "-m", "m", "--requests", "2", "-c", "1")
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["failures"] == {"status 401": 2}
    assert "none of 2 requests succeeded; the first: status 401: no key" in done.stderr
    assert bench("--requests", "0").returncode == 2
