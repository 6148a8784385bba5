"""What Prometheus reads from a real server: all names from the start, and numbers that equal what clients were told."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvarn import __version__
from kvarn.server.http.connections import MIN_WAITED_S
from tests.server.keyed import chat_body, completion_body, events
from tests.server.process import SMOLLM2, ServerProcess, model_path
from tests.server.scraping import Scrape, read, scrape

pytestmark = pytest.mark.model

GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "state_slots_total",
    "state_slots_used",
    "prefix_disk_bytes",
    "cache_config_info",
    "build_info",
    "http_requests_active",
    "http_connections_open",
    "memory_budget_bytes",
    "retrieval_collections_open",
    "limits_away",
    "limits_replicas",
)
COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "prefix_disk_read_bytes",
    "prefix_disk_written_bytes",
    "prefix_disk_dropped_blocks",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "corrupted_requests",
    "num_aborted_requests",
    "num_grammar_cache_hit",
    "dllm_denoise_steps",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "evicted_tokens",
    "rate_limited",
    "limits_failures",
    "cancelled",
    "cpu_throttled_seconds",
    "http_connections",
    "http_connections_refused",
    "http_connections_dropped",
    "http_connections_evicted",
    "http_received_bytes",
    "http_sent_bytes",
    "http_responses",
    "retrieval_hot_hits",
    "retrieval_hot_misses",
    "retrieval_documents_added",
    "retrieval_chunks_added",
    "retrieval_primed",
)
# Those in the first tuple move with every request.
MOVING = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "iteration_tokens_total",
)
HISTOGRAMS = (
    *MOVING,
    "grammar_compilation_time_seconds",
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
    "retrieval_search_seconds",
    "limits_seconds",
)


@pytest.fixture(scope="module")
def fresh() -> Iterator[ServerProcess]:
    """A server nobody has asked anything yet, with vLLM's names beside ours."""
    arguments = ("--model", model_path(SMOLLM2), "--context", "1024")
    with ServerProcess(*arguments, config='metrics_compat = "vllm"\n') as process:
        yield process


@pytest.fixture(scope="module")
def at_start(fresh: ServerProcess) -> Scrape:
    """The first scrape, before any request."""
    return scrape(fresh)


@pytest.fixture
def client(fresh: ServerProcess, at_start: Scrape) -> Iterator[httpx.Client]:
    with fresh.client() as http:
        yield http


def test_every_name_is_there_before_the_first_request(at_start: Scrape) -> None:
    names = {name for name, _ in at_start}
    expected = {f"kvarn_{name}" for name in GAUGES} | {f"kvarn_{name}_total" for name in COUNTERS}
    expected |= {f"kvarn_{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert expected <= names
    assert {name for name in names if name.startswith("kvarn_")} == expected


def test_what_requests_count_is_0_before_the_first_request(at_start: Scrape) -> None:
    for name in ("prompt_tokens", "generation_tokens", "request_success", "cancelled", "rate_limited"):
        assert read(at_start, f"kvarn_{name}_total") == 0
    for name in MOVING[:-1]:  # the warm-up took one step
        assert read(at_start, f"kvarn_{name}_count") == 0
    for name in ("num_requests_running", "num_requests_waiting", "http_requests_active"):
        assert read(at_start, f"kvarn_{name}") == 0


def test_the_process_and_its_version_are_told(fresh: ServerProcess, at_start: Scrape) -> None:
    assert read(at_start, "kvarn_build_info", version=__version__) == 1
    pages = int(Path(f"/proc/{fresh.pid}/statm").read_text().split()[1])
    assert read(at_start, "process_resident_memory_bytes") == pytest.approx(pages * resource.getpagesize(), rel=0.2)
    assert read(at_start, "process_open_fds") >= len(os.listdir(f"/proc/{fresh.pid}/fd")) - 8
    assert read(at_start, "process_cpu_seconds_total") > 0
    assert read(at_start, "process_max_fds") > 0
    assert 0 < time.time() - read(at_start, "process_start_time_seconds") < 3600


def test_vllms_names_are_told_beside_ours(at_start: Scrape) -> None:
    names = {name for name, _ in at_start}
    assert {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds_bucket"} <= names
    assert read(at_start, "vllm:cache_config_info", block_size="16") == 1


def test_the_model_is_labelled_with_its_name_and_planned_memory(at_start: Scrape) -> None:
    assert read(at_start, "kvarn_memory_budget_bytes", model_name=SMOLLM2, part="weights") > 50e6
    assert read(at_start, "kvarn_memory_budget_bytes", model_name=SMOLLM2, part="kv") > 1e6
    assert all(
        dict(labels)["model_name"] == SMOLLM2 for name, labels in at_start if name == "kvarn_prompt_tokens_total"
    )


def test_counters_equal_the_usage_that_clients_were_told(fresh: ServerProcess, client: httpx.Client) -> None:
    before = scrape(fresh)
    usages = [
        client.post("/v1/chat/completions", json=chat_body("Name a colour.", n=3, max_tokens=6, temperature=1)).json()[
            "usage"
        ],
        client.post("/v1/completions", json=completion_body("One two", max_tokens=5)).json()["usage"],
        client.post("/v1/completions", json={**completion_body(""), "prompt": ["Red", "Blue and green"]}).json()[
            "usage"
        ],
        _streamed_usage(client, "Say something long about the sea."),
        _streamed_usage(client, "Say something long about the sea."),
    ]
    after = scrape(fresh)

    def gained(name: str) -> float:
        return read(after, name) - read(before, name)

    assert gained("kvarn_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert gained("kvarn_generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0
    assert gained("kvarn_prompt_tokens_cached_total") == cached
    assert gained("kvarn_prefix_cache_hits_total") >= cached
    assert gained("kvarn_prefix_cache_queries_total") >= gained("kvarn_prefix_cache_hits_total")
    assert gained("kvarn_request_success_total") == 8  # answers: 3 + 1 + 2 + 1 + 1
    assert gained("kvarn_request_params_n_count") == 6  # prompts
    assert gained("vllm:generation_tokens_total") == gained("kvarn_generation_tokens_total")


def test_histograms_move_with_real_requests(fresh: ServerProcess, client: httpx.Client, patience: float) -> None:
    before = scrape(fresh)
    began = time.monotonic()
    assert client.post("/v1/chat/completions", json=chat_body("hi", max_tokens=5)).status_code == 200
    took_s = time.monotonic() - began
    after = scrape(fresh)
    for name in MOVING:
        assert read(after, f"kvarn_{name}_count") > read(before, f"kvarn_{name}_count"), name
    latency_s = read(after, "kvarn_e2e_request_latency_seconds_sum") - read(
        before, "kvarn_e2e_request_latency_seconds_sum"
    )
    assert 0 < latency_s <= took_s
    first_s = read(after, "kvarn_time_to_first_token_seconds_sum") - read(
        before, "kvarn_time_to_first_token_seconds_sum"
    )
    assert 0 < first_s < latency_s


def test_a_running_request_is_seen_and_gone_when_it_ends(fresh: ServerProcess, client: httpx.Client) -> None:
    body = chat_body("Count to a thousand.", max_tokens=600, stream=True)
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        told = events(response)  # kept: httpx closes the connection with it
        next(told)
        during = scrape(fresh)
        assert read(during, "kvarn_num_requests_running") == 1
        assert read(during, "kvarn_http_requests_active") == 1
        assert 0 < read(during, "kvarn_kv_cache_usage_perc") < 1
    aborted = read(during, "kvarn_cancelled_total", phase="decode")
    until = time.monotonic() + 5
    while read(scrape(fresh), "kvarn_num_requests_running") and time.monotonic() < until:
        time.sleep(0.05)
    after = scrape(fresh)
    assert read(after, "kvarn_num_requests_running") == 0
    assert read(after, "kvarn_http_requests_active") == 0
    assert read(after, "kvarn_cancelled_total", phase="decode") == aborted + 1
    assert read(after, "kvarn_kv_cache_usage_perc") == 0


def test_connections_bytes_and_responses_are_counted(fresh: ServerProcess, client: httpx.Client) -> None:
    client.get("/health/live")
    before = scrape(fresh)
    assert read(before, "kvarn_http_connections_open") >= 2  # the client's, and the one that asks
    big = client.post("/v1/completions", json=completion_body("word " * 2000, max_tokens=1))
    assert big.status_code == 400
    assert client.get("/nowhere").status_code == 404
    with socket.create_connection(("127.0.0.1", fresh.port), 10) as no_http:
        no_http.sendall(b"what is this?\r\n\r\n")
        refusal = b"".join(iter(lambda: no_http.recv(4096), b""))
    assert refusal.startswith(b"HTTP/1.1 400 ")
    after = scrape(fresh)

    def gained(name: str, **labels: str) -> float:
        return read(after, f"kvarn_{name}_total", **labels) - read(before, f"kvarn_{name}_total", **labels)

    assert gained("http_responses", status="400") == 2  # of the application, and of the connection itself
    assert gained("http_responses", status="404") == 1
    assert gained("http_responses", status="200") == 1  # the first scrape
    assert gained("http_connections") == 2
    assert gained("http_received_bytes") > 10_000
    assert gained("http_sent_bytes") > len(big.content) + len(refusal)
    assert gained("http_connections_refused") == gained("http_connections_dropped") == 0


def test_connections_beyond_the_limit_are_counted() -> None:
    arguments = ("--model", model_path(SMOLLM2), "--context", "512")
    with ServerProcess(*arguments, config="max_connections = 2\n") as server, server.client() as http:
        assert http.get("/health/live").status_code == 200
        time.sleep(2 * MIN_WAITED_S)
        idle = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(2)]
        time.sleep(2 * MIN_WAITED_S)
        assert http.get("/health/live").status_code == 200  # the first has made room, so that this is another one
        assert idle[0].recv(4096).startswith(b"HTTP/1.1 503 ")
        families = text_string_to_metric_families(http.get("/metrics").text)
        found = {(s.name, s.labels.get("status")): s.value for family in families for s in family.samples}
        for one in idle:
            one.close()
    assert found["kvarn_http_connections_refused_total", None] == 1
    assert found["kvarn_http_connections_evicted_total", None] == 2
    assert found["kvarn_http_connections_open", None] == 2
    assert found["kvarn_http_responses_total", "503"] == 1


def test_compiled_and_reused_grammars_are_counted(fresh: ServerProcess, client: httpx.Client) -> None:
    before = scrape(fresh)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for _ in range(2):
        answer = client.post("/v1/chat/completions", json=chat_body("hi", max_tokens=4, response_format=wanted))
        assert answer.status_code == 200, answer.text
    after = scrape(fresh)
    name = "kvarn_grammar_compilation_time_seconds_count"
    assert read(after, name) - read(before, name) == 1
    assert read(after, "kvarn_num_grammar_cache_hit_total") - read(before, "kvarn_num_grammar_cache_hit_total") == 1


def test_scraping_does_not_wait_for_a_busy_engine(fresh: ServerProcess, client: httpx.Client, patience: float) -> None:
    body = completion_body("word " * 700, max_tokens=2, stream=True)
    with client.stream("POST", "/v1/completions", json=body) as response:
        for _ in range(5):
            began = time.monotonic()
            scrape(fresh)
            assert time.monotonic() - began < 1.0 * patience
        assert response.status_code == 200


def _streamed_usage(client: httpx.Client, text: str) -> dict[str, dict[str, int] | int]:
    body = chat_body(text, max_tokens=6, stream=True, stream_options={"include_usage": True})
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        *_, last = events(response)
    return dict(last["usage"])
