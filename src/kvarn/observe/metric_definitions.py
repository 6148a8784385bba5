"""Every metric of a server: name, kind, labels, bucket bounds and help text. Data only.

Names are those of vLLM where it has them, because dashboards and gateways look for them (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvarn.observe.histogram import COUNTS, LONG_SECONDS, SECONDS, SHORT_SECONDS, TOKENS
from kvarn.types import FinishReason

MODEL = ("model_name",)
RATE_LIMIT_REASONS = ("requests", "tokens", "concurrency", "queue", "memory", "limits")
LIMITS_FAILURES = ("unreachable", "timeout", "error", "emptied")
SEARCH_MODES = ("hybrid", "dense", "sparse")
PHASES = ("queued", "prefill", "decode")
WAITING_REASONS = ("capacity", "prompt")
HTTP_STATUSES = ("200", "400", "401", "403", "404", "408", "413", "429", "499", "500", "503")  # others when they occur
DRAFT_POSITIONS = tuple(map(str, range(15)))
MEMORY_PARTS = ("weights", "kv", "states", "scratch", "runtime")
ENGINE_GAUGES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("state_slots_total", "state_slots_used", "prefix_disk_bytes"),
)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. The values of the last label are known beforehand; models and tiers are given by the server."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = MODEL
    values: Sequence[str] = ()  # of the last label, if it is neither model_name nor tier
    bounds: tuple[float, ...] = ()
    in_vllm: bool = True  # vLLM has it under the same name


def _seconds(name: str, text: str) -> MetricSpec:
    return MetricSpec(name, "histogram", text, bounds=SECONDS)


def _http(name: str, kind: Literal["counter", "gauge"], text: str) -> MetricSpec:
    return MetricSpec(name, kind, text, labels=(), in_vllm=False)


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("num_requests_running", "gauge", "Requests that take part in steps."),
    MetricSpec("num_requests_waiting", "gauge", "Requests that wait for their first step."),
    MetricSpec(
        "num_requests_waiting_by_reason",
        "gauge",
        "Those waiting for room in the cache or the batch (capacity), or for a prompt they share (prompt).",
        labels=(*MODEL, "reason"),
        values=WAITING_REASONS,
    ),
    MetricSpec("kv_cache_usage_perc", "gauge", "Share of the KV cache that requests hold, 0 to 1."),
    MetricSpec("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    MetricSpec("prefix_cache_hits", "counter", "Prompt tokens found there."),
    MetricSpec("external_prefix_cache_queries", "counter", "Prompt tokens looked for in the prefix cache on disk."),
    MetricSpec("external_prefix_cache_hits", "counter", "Prompt tokens restored from there."),
    MetricSpec("num_preemptions", "counter", "Requests that gave their blocks back and waited again."),
    MetricSpec("prompt_tokens", "counter", "Prompt tokens of ended requests, as reported to clients."),
    MetricSpec("prompt_tokens_cached", "counter", "Those of them that were not computed again."),
    MetricSpec("generation_tokens", "counter", "Answer tokens of ended requests, as reported to clients."),
    MetricSpec(
        "request_success",
        "counter",
        "Ended answers by the reason of their end.",
        labels=(*MODEL, "finished_reason"),
        values=tuple(FinishReason),
    ),
    MetricSpec("request_prompt_tokens", "histogram", "Prompt tokens of a request.", bounds=TOKENS),
    MetricSpec("request_generation_tokens", "histogram", "Tokens of an answer.", bounds=TOKENS),
    MetricSpec("iteration_tokens_total", "histogram", "Tokens computed in one step.", bounds=TOKENS),
    MetricSpec("request_params_n", "histogram", "n of a request.", bounds=COUNTS),
    MetricSpec("request_params_max_tokens", "histogram", "max_tokens of a request that named it.", bounds=TOKENS),
    _seconds("time_to_first_token_seconds", "From submission to the first token."),
    _seconds("inter_token_latency_seconds", "Between two tokens of one answer."),
    _seconds("request_time_per_output_token_seconds", "Mean time between the tokens of one answer."),
    _seconds("e2e_request_latency_seconds", "From the request to its end."),
    _seconds("request_queue_time_seconds", "From submission to the first step."),
    _seconds("request_prefill_time_seconds", "From the first step to the first token."),
    _seconds("request_decode_time_seconds", "From the first token to the last."),
    MetricSpec("corrupted_requests", "counter", "Requests that failed because the model's scores were not numbers."),
    MetricSpec(
        "kv_block_lifetime_seconds", "histogram", "From the filling of a cached block to its loss.", bounds=LONG_SECONDS
    ),
    MetricSpec(
        "kv_block_idle_before_evict_seconds",
        "histogram",
        "From the last use of a cached block to its loss.",
        bounds=LONG_SECONDS,
    ),
    MetricSpec(
        "kv_block_reuse_gap_seconds",
        "histogram",
        "From the last use of a cached block to the next.",
        bounds=LONG_SECONDS,
    ),
    MetricSpec("spec_decode_num_drafts", "counter", "Times that guessed tokens of a request were computed."),
    MetricSpec("spec_decode_num_draft_tokens", "counter", "Guessed tokens computed."),
    MetricSpec("spec_decode_num_accepted_tokens", "counter", "Those of them that were right."),
    MetricSpec(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Those by their place in the guess.",
        labels=(*MODEL, "position"),
        values=DRAFT_POSITIONS,
    ),
    MetricSpec("num_aborted_requests", "counter", "Requests that their client cancelled or left.", in_vllm=False),
    MetricSpec(
        "grammar_compilation_time_seconds",
        "histogram",
        "To compile a schema, pattern or grammar.",
        bounds=SECONDS,
        in_vllm=False,
    ),
    MetricSpec("num_grammar_cache_hit", "counter", "Grammars that had been compiled before.", in_vllm=False),
    MetricSpec("prefix_disk_read_bytes", "counter", "Blocks restored from disk, in bytes.", in_vllm=False),
    MetricSpec("prefix_disk_written_bytes", "counter", "Blocks written to disk, in bytes.", in_vllm=False),
    MetricSpec("prefix_disk_dropped_blocks", "counter", "Blocks to be written that were not.", in_vllm=False),
    MetricSpec("prefix_disk_bytes", "gauge", "Size of the model's prefix cache on disk.", in_vllm=False),
    MetricSpec("dllm_denoise_steps", "counter", "Passes that filled positions of an answer.", in_vllm=False),
    MetricSpec("evicted_tokens", "counter", "Cached tokens that gave way to others.", in_vllm=False),
    MetricSpec(
        "memory_budget_bytes",
        "gauge",
        "Memory planned for a model, by purpose.",
        labels=(*MODEL, "part"),
        values=MEMORY_PARTS,
        in_vllm=False,
    ),
    MetricSpec(
        "cancelled",
        "counter",
        "Requests that were cancelled, by how far they had come.",
        labels=("phase",),
        values=PHASES,
        in_vllm=False,
    ),
    _http("http_requests_active", "gauge", "HTTP requests being served."),
    _http("http_connections_open", "gauge", "Connections, those beyond the limit not counted."),
    _http("http_connections", "counter", "Connections accepted."),
    _http("http_connections_refused", "counter", "Connections beyond the limit, told so and closed."),
    _http("http_connections_evicted", "counter", "Connections closed for others while they waited for their client."),
    _http("http_connections_dropped", "counter", "Connections ended because their client did not read."),
    _http("http_received_bytes", "counter", "Bytes that clients sent."),
    _http("http_sent_bytes", "counter", "Bytes written for clients."),
    MetricSpec(
        "http_responses",
        "counter",
        "Responses by status; 499: the client left before there was one.",
        labels=("status",),
        values=HTTP_STATUSES,
        in_vllm=False,
    ),
    MetricSpec(
        "cpu_throttled_seconds",
        "counter",
        "Time for which the system held this process's cgroup back (cpu.stat).",
        labels=(),
        in_vllm=False,
    ),
    MetricSpec(
        "rate_limited",
        "counter",
        "Requests refused, by tier and by the limit they met.",
        labels=("tier", "reason"),
        values=RATE_LIMIT_REASONS,
        in_vllm=False,
    ),
    _http("limits_away", "gauge", "1 while the Redis that counts limits does not answer, or has just come back."),
    _http("limits_replicas", "gauge", "Replicas that count limits together, as last known; 0: only this one."),
    MetricSpec(
        "limits_failures",
        "counter",
        "Calls of the Redis that counts limits that failed.",
        labels=("reason",),
        values=LIMITS_FAILURES,
        in_vllm=False,
    ),
    MetricSpec(
        "limits_seconds",
        "histogram",
        "To count what a request takes in Redis.",
        labels=(),
        bounds=SHORT_SECONDS,
        in_vllm=False,
    ),
    MetricSpec(
        "retrieval_search_seconds",
        "histogram",
        "To search a collection, the query's embedding included.",
        labels=("mode",),
        values=SEARCH_MODES,
        bounds=SECONDS,
        in_vllm=False,
    ),
    MetricSpec("retrieval_hot_hits", "counter", "Searches answered from memory.", labels=(), in_vllm=False),
    MetricSpec("retrieval_hot_misses", "counter", "Searches that were computed.", labels=(), in_vllm=False),
    MetricSpec("retrieval_documents_added", "counter", "Documents added or replaced.", labels=(), in_vllm=False),
    MetricSpec("retrieval_chunks_added", "counter", "Chunks they were cut into.", labels=(), in_vllm=False),
    MetricSpec("retrieval_collections_open", "gauge", "Collections open now.", labels=(), in_vllm=False),
    MetricSpec(
        "retrieval_primed", "counter", "Prompts of hot questions computed while idle.", labels=(), in_vllm=False
    ),
    MetricSpec(
        "build_info",
        "gauge",
        "The version that runs; always 1.",
        labels=("version", "python_version", "machine"),
        in_vllm=False,
    ),
    MetricSpec(
        "state_slots_total", "gauge", "Slots for the states of recurrent layers; 0: it has none.", in_vllm=False
    ),
    MetricSpec("state_slots_used", "gauge", "Those of them that requests hold.", in_vllm=False),
    MetricSpec(
        "cache_config_info", "gauge", "The KV cache; always 1.", labels=(*MODEL, "block_size", "num_gpu_blocks")
    ),
)
