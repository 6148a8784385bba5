"""What a server counts, and how Prometheus reads it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvarn.engine.stats import EngineStats
from kvarn.errors import BackendError, BrokenScores
from kvarn.kv.pool import BlockPool
from kvarn.machine import cpu_throttled_s
from kvarn.observe.histogram import LONG_SECONDS, Histogram
from kvarn.observe.metric_definitions import METRICS
from kvarn.observe.metrics import Metrics
from kvarn.types import Completion, FinishReason, SamplingParams, Timings, Usage
from tests.unit.machine.tree import v1, v2

TIMINGS = Timings(queue_s=0.02, prefill_s=0.2, decode_s=0.9, first_token_s=0.22)
IDLE = EngineStats(
    running=0,
    waiting=0,
    blocks_total=100,
    blocks_used=0,
    blocks_cached=0,
    blocks_shared=0,
    prefix_hit_tokens=0,
    evictions=0,
    preemptions=0,
    steps=0,
    retried_steps=0,
    prompt_tokens=0,
    generated_tokens=0,
    tokens_per_s=0.0,
    step_s=0.0,
    overhead_share=0.0,
    block_size=16,
)


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a scrape by name and labels."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def read(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def answer(
    num_prompt: int, num_output: int, num_cached: int = 0, reason: FinishReason = FinishReason.STOP
) -> Completion:
    return Completion("text", (1,) * num_output, reason, Usage(num_prompt, num_output, num_cached), TIMINGS, seed=1)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["m"], tiers=["free", "pro"])


def test_every_series_is_there_at_0_from_the_start(metrics: Metrics) -> None:
    found = samples(metrics)
    assert {
        value for (name, _), value in found.items() if name.startswith("kvarn_") and not name.endswith("_info")
    } == {0.0}
    for metric in METRICS:
        if metric.name == "cache_config_info":  # there is no cache yet
            continue
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
        assert any(name == f"kvarn_{metric.name}{suffix}" for name, _ in found), metric.name
    assert ("kvarn_rate_limited_total", frozenset({("tier", "pro"), ("reason", "tokens")})) in found
    assert ("kvarn_request_success_total", frozenset({("model_name", "m"), ("finished_reason", "length")})) in found


def test_no_series_of_another_server_is_told(metrics: Metrics) -> None:
    Metrics(["stranger"]).request_refused("free", "queue")
    names = {name for name, _ in samples(metrics)}
    assert all(name.startswith(("kvarn_", "process_")) for name in names)
    assert "stranger" not in metrics.render().decode()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_the_process_is_told_under_the_usual_names(metrics: Metrics) -> None:
    assert read(metrics, "process_resident_memory_bytes") > 10e6
    assert read(metrics, "process_cpu_seconds_total") > 0
    assert 3 <= read(metrics, "process_open_fds") <= read(metrics, "process_max_fds")
    assert abs(read(metrics, "process_start_time_seconds") - time.time()) < 86_400


def test_the_version_is_told_as_labels() -> None:
    found = samples(Metrics(version="1.2.3"))
    ((_, labels),) = [key for key in found if key[0] == "kvarn_build_info"]
    assert dict(labels).keys() == {"version", "python_version", "machine"}
    assert dict(labels)["version"] == "1.2.3"


def test_a_prompt_counts_once_and_all_its_answers_count(metrics: Metrics) -> None:
    first, second = answer(10, 5, 8), answer(10, 7, 8, FinishReason.LENGTH)
    metrics.request_finished("m", replace(first, alternatives=(second,)), SamplingParams(n=2, max_tokens=7), 1.5)
    assert read(metrics, "kvarn_prompt_tokens_total", model_name="m") == 10
    assert read(metrics, "kvarn_prompt_tokens_cached_total", model_name="m") == 8
    assert read(metrics, "kvarn_generation_tokens_total", model_name="m") == 12
    assert read(metrics, "kvarn_request_success_total", model_name="m", finished_reason="stop") == 1
    assert read(metrics, "kvarn_request_success_total", model_name="m", finished_reason="length") == 1
    assert read(metrics, "kvarn_request_generation_tokens_count", model_name="m") == 2
    assert read(metrics, "kvarn_request_prompt_tokens_count", model_name="m") == 1
    assert read(metrics, "kvarn_request_params_n_sum", model_name="m") == 2
    assert read(metrics, "kvarn_request_params_max_tokens_sum", model_name="m") == 7
    assert read(metrics, "kvarn_e2e_request_latency_seconds_sum", model_name="m") == 1.5


def test_the_times_of_an_answer_fall_into_their_buckets(metrics: Metrics) -> None:
    metrics.request_finished("m", answer(10, 10), SamplingParams(), 1.0)
    for bound, count in (("0.1", 0), ("0.25", 1), ("+Inf", 1)):
        assert read(metrics, "kvarn_time_to_first_token_seconds_bucket", model_name="m", le=bound) == count
    assert read(metrics, "kvarn_request_time_per_output_token_seconds_sum", model_name="m") == pytest.approx(0.1)
    assert read(metrics, "kvarn_request_queue_time_seconds_sum", model_name="m") == pytest.approx(0.02)
    assert read(metrics, "kvarn_request_prefill_time_seconds_sum", model_name="m") == pytest.approx(0.2)
    assert read(metrics, "kvarn_request_decode_time_seconds_sum", model_name="m") == pytest.approx(0.9)


def test_an_answer_without_tokens_has_no_first_token(metrics: Metrics) -> None:
    metrics.request_finished("m", answer(10, 0, reason=FinishReason.CANCELLED), SamplingParams(), 1.0)
    assert read(metrics, "kvarn_time_to_first_token_seconds_count", model_name="m") == 0
    assert read(metrics, "kvarn_cancelled_total", phase="prefill") == 1
    assert read(metrics, "kvarn_num_aborted_requests_total", model_name="m") == 1


def test_a_client_that_left_is_counted_with_what_was_computed_for_it(metrics: Metrics) -> None:
    metrics.request_abandoned("m", Usage(9, 4, 2), "decode")
    assert read(metrics, "kvarn_cancelled_total", phase="decode") == 1
    assert read(metrics, "kvarn_request_success_total", model_name="m", finished_reason="cancelled") == 1
    assert read(metrics, "kvarn_prompt_tokens_total", model_name="m") == 9
    assert read(metrics, "kvarn_generation_tokens_total", model_name="m") == 4


def test_only_broken_scores_make_a_corrupted_request(metrics: Metrics) -> None:
    metrics.request_failed("m", BackendError("x"))
    assert read(metrics, "kvarn_corrupted_requests_total", model_name="m") == 0
    metrics.request_failed("m", BrokenScores("x"))
    assert read(metrics, "kvarn_corrupted_requests_total", model_name="m") == 1
    assert read(metrics, "kvarn_request_success_total", model_name="m", finished_reason="failed") == 2


def test_gaps_between_tokens_are_a_histogram(metrics: Metrics) -> None:
    gaps = metrics.token_gaps("m")
    for seconds in (0.004, 0.006, 1000.0):
        gaps.observe(seconds)
    found = samples(metrics)
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in found.items()
        if name == "kvarn_inter_token_latency_seconds_bucket"
    }
    assert (buckets["0.0025"], buckets["0.005"], buckets["0.01"], buckets["600.0"], buckets["+Inf"]) == (0, 1, 2, 2, 3)


def test_an_engine_is_exposed_as_it_was_last_polled(metrics: Metrics) -> None:
    seen = replace(IDLE, running=3, waiting=5, waiting_for_prompt=2, blocks_used=25, prefix_query_tokens=90)
    seen = replace(seen, prefix_hit_tokens=32, preemptions=1, evictions=2)
    metrics.update_engine("m", seen, {"weights": 1000, "kv": 200})
    assert read(metrics, "kvarn_num_requests_running", model_name="m") == 3
    assert read(metrics, "kvarn_num_requests_waiting", model_name="m") == 5
    assert read(metrics, "kvarn_num_requests_waiting_by_reason", model_name="m", reason="capacity") == 3
    assert read(metrics, "kvarn_num_requests_waiting_by_reason", model_name="m", reason="prompt") == 2
    assert read(metrics, "kvarn_kv_cache_usage_perc", model_name="m") == 0.25
    assert read(metrics, "kvarn_prefix_cache_queries_total", model_name="m") == 90
    assert read(metrics, "kvarn_prefix_cache_hits_total", model_name="m") == 32
    assert read(metrics, "kvarn_num_preemptions_total", model_name="m") == 1
    assert read(metrics, "kvarn_evicted_tokens_total", model_name="m") == 32
    assert read(metrics, "kvarn_memory_budget_bytes", model_name="m", part="weights") == 1000
    assert read(metrics, "kvarn_cache_config_info", model_name="m", block_size="16", num_gpu_blocks="100") == 1


def test_the_usage_of_a_cache_is_that_of_its_fullest_blocks(metrics: Metrics) -> None:
    metrics.update_engine("m", replace(IDLE, blocks_used=25, window_blocks_total=10, window_blocks_used=8), {})
    assert read(metrics, "kvarn_kv_cache_usage_perc", model_name="m") == 0.8


def test_slots_of_states_are_counted_until_the_model_is_unloaded(metrics: Metrics) -> None:
    metrics.update_engine("m", replace(IDLE, state_slots_total=12, state_slots_used=4), {"states": 800})
    assert read(metrics, "kvarn_state_slots_total", model_name="m") == 12
    assert read(metrics, "kvarn_state_slots_used", model_name="m") == 4
    assert read(metrics, "kvarn_memory_budget_bytes", model_name="m", part="states") == 800
    metrics.remove_unloaded([])
    assert read(metrics, "kvarn_state_slots_total", model_name="m") == 0


def test_counters_go_on_when_a_model_is_loaded_again(metrics: Metrics) -> None:
    steps = Histogram(METRICS[13].bounds)
    steps.observe(5)
    first = replace(IDLE, preemptions=4, distributions={"iteration_tokens_total": steps.snapshot()})
    for _ in range(3):  # looking counts nothing
        metrics.update_engine("m", first, {})
    metrics.remove_unloaded([])
    assert read(metrics, "kvarn_kv_cache_usage_perc", model_name="m") == 0
    metrics.update_engine("m", replace(first, preemptions=1), {})
    assert read(metrics, "kvarn_num_preemptions_total", model_name="m") == 5
    assert read(metrics, "kvarn_iteration_tokens_total_count", model_name="m") == 2
    assert read(metrics, "kvarn_iteration_tokens_total_sum", model_name="m") == 10


def test_an_engine_that_counts_less_than_before_was_started_anew(metrics: Metrics) -> None:
    metrics.update_engine("m", replace(IDLE, preemptions=4), {})
    metrics.update_engine("m", replace(IDLE, preemptions=1), {})
    assert read(metrics, "kvarn_num_preemptions_total", model_name="m") == 5


def test_vllms_names_and_reasons_are_told_when_asked_for() -> None:
    metrics = Metrics(["m"], compat="vllm")
    metrics.request_finished("m", answer(3, 2, reason=FinishReason.DEADLINE), SamplingParams(), 1.0)
    metrics.request_abandoned("m", Usage(1, 1), "decode")
    assert read(metrics, "vllm:request_success_total", model_name="m", finished_reason="abort") == 2
    assert read(metrics, "vllm:prompt_tokens_total", model_name="m") == 4
    assert read(metrics, "vllm:time_to_first_token_seconds_count", model_name="m") == 1
    assert not [name for name, _ in samples(metrics) if name.startswith("vllm:rate_limited")]
    assert not [name for name, _ in samples(Metrics(["m"])) if name.startswith("vllm:")]


def test_a_model_name_cannot_break_the_text() -> None:
    name = 'a"\n} 1\nb\\'
    metrics = Metrics([name])
    metrics.request_failed(name, BackendError("x"))
    assert read(metrics, "kvarn_request_success_total", model_name=name, finished_reason="failed") == 1


def test_throttled_time_is_read_from_both_kinds_of_cgroup(tmp_path: Path) -> None:
    v2(tmp_path / "2", "/app", {"app/cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 2500000"})
    v1(tmp_path / "1", "/app", {"cpu,cpuacct/app/cpu.stat": "nr_periods 1\nnr_throttled 3\nthrottled_time 1500000000"})
    assert cpu_throttled_s(tmp_path / "2") == 2.5
    assert cpu_throttled_s(tmp_path / "1") == 1.5
    assert cpu_throttled_s(tmp_path / "none") == 0.0


def test_the_pool_knows_how_long_cached_blocks_live_lie_idle_and_wait_for_their_next_use() -> None:
    now = [0.0]
    pool = BlockPool(1, clock=lambda: now[0])
    block = pool.allocate()
    pool.mark_cacheable(block)
    now[0] = 10.0
    pool.release([block])
    now[0] = 14.0
    pool.share([block])
    pool.release([block])
    now[0] = 20.0
    assert pool.allocate() == block
    found = {name: (seen.num_observed, seen.total) for name, seen in pool.histograms().items()}
    assert found == {
        "kv_block_reuse_gap_seconds": (1, 4.0),
        "kv_block_idle_before_evict_seconds": (1, 6.0),
        "kv_block_lifetime_seconds": (1, 20.0),
    }


def test_a_histogram_counts_a_bound_as_inside() -> None:
    histogram = Histogram(LONG_SECONDS)
    histogram.observe(0.1)
    histogram.observe(0.11, times=2)
    snapshot = histogram.snapshot()
    assert snapshot.counts[:3] == (1, 2, 0)
    assert snapshot.total == pytest.approx(0.32)
