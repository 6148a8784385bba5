"""The metrics of a server: requests as they end, engines and HTTP as a scrape polls them. For the event loop thread."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from kvarn.errors import BrokenScores
from kvarn.machine import cpu_throttled_s
from kvarn.observe.exposition import make_registry, render
from kvarn.observe.histogram import Histogram, HistogramSnapshot
from kvarn.observe.metric_definitions import DRAFT_POSITIONS, ENGINE_GAUGES, MEMORY_PARTS
from kvarn.observe.metric_store import LastPoll, MetricStore
from kvarn.types import Completion, FinishReason, SamplingParams, Usage


class EngineStatsView(Protocol):
    """The fields of kvarn.engine.stats.EngineStats that are exposed. Counts are since the engine's start."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def waiting_for_prompt(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def window_blocks_total(self) -> int: ...
    @property
    def window_blocks_used(self) -> int: ...
    @property
    def state_slots_total(self) -> int: ...
    @property
    def state_slots_used(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def prefix_query_tokens(self) -> int: ...
    @property
    def prefix_hit_tokens(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def denoise_steps(self) -> int: ...
    @property
    def draft_totals(self) -> Mapping[str, float]: ...
    @property
    def accepted_per_position(self) -> Sequence[int]: ...
    @property
    def disk(self) -> DiskStatsView: ...
    @property
    def distributions(self) -> Mapping[str, HistogramSnapshot]: ...


class DiskStatsView(Protocol):
    """The fields of kvarn.engine.persistence.disk_prefixes.DiskStats that are exposed."""

    @property
    def query_tokens(self) -> int: ...
    @property
    def hit_tokens(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def dropped_blocks(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class TrafficView(Protocol):
    """The fields of kvarn.server.http.traffic.Traffic that are exposed."""

    @property
    def num_open(self) -> int: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def num_refused(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...
    @property
    def num_received_bytes(self) -> int: ...
    @property
    def num_sent_bytes(self) -> int: ...
    @property
    def responses(self) -> Mapping[int, int]: ...


class Metrics:
    """All series of one server, each at 0 from the start."""

    def __init__(
        self, models: Iterable[str] = (), *, tiers: Iterable[str] = (), compat: str = "", version: str = ""
    ) -> None:
        """compat="vllm" also exposes the metrics vLLM has under vLLM's own names; version: Kvarn's own."""
        self._store = MetricStore()
        self._store.start_at_zero({"model_name": tuple(models), "tier": tuple(tiers)})
        self._engines: dict[str, LastPoll] = {}
        self._store.set("build_info", version, platform.python_version(), platform.machine(), to=1.0)
        self._throttled_at_start_s = cpu_throttled_s()
        self.registry = make_registry(self._store, with_vllm=compat == "vllm")

    def update_http(self, num_requests: int, traffic: TrafficView) -> None:
        """Update the HTTP metrics: requests being served, and the totals over all connections."""
        store = self._store
        store.set("http_requests_active", to=num_requests)
        store.set("http_connections_open", to=traffic.num_open)
        store.set("http_connections", to=traffic.num_accepted)
        store.set("http_connections_refused", to=traffic.num_refused)
        store.set("http_connections_evicted", to=traffic.num_evicted)
        store.set("http_connections_dropped", to=traffic.num_dropped)
        store.set("http_received_bytes", to=traffic.num_received_bytes)
        store.set("http_sent_bytes", to=traffic.num_sent_bytes)
        for status, num_responses in traffic.responses.items():
            store.set("http_responses", str(status), to=num_responses)

    def request_refused(self, tier: str, reason: str) -> None:
        """Count a request over a limit: requests, tokens, concurrency, queue, memory or limits."""
        self._store.increment("rate_limited", tier, reason)

    def update_limits(self, is_away: bool, num_replicas: int) -> None:
        """Whether limits are counted without Redis, and for how many replicas."""
        self._store.set("limits_away", to=float(is_away))
        self._store.set("limits_replicas", to=num_replicas)

    def limits_failed(self, reason: str) -> None:
        """Count a call of Redis that failed: unreachable, timeout, error or emptied."""
        self._store.increment("limits_failures", reason)

    def limits_asked(self, seconds: float) -> None:
        """Count a call of Redis."""
        self._store.histogram("limits_seconds").observe(seconds)

    def token_gaps(self, model: str) -> Histogram:
        """The histogram for the seconds between two tokens of an answer."""
        return self._store.histogram("inter_token_latency_seconds", model)

    def update_grammars(self, model: str, compile_times: HistogramSnapshot, num_reused: int) -> None:
        """Update the grammar metrics from the totals since the model was loaded."""
        last = self._engines.setdefault(model, LastPoll())
        name = "grammar_compilation_time_seconds"
        self._store.histogram(name, model).add(last.histogram_increase(name, compile_times))
        self._store.increment("num_grammar_cache_hit", model, by=last.increase("num_grammar_cache_hit", num_reused))

    def request_failed(self, model: str, error: BaseException) -> None:
        """Count a request that failed on the server's side."""
        self._store.increment("request_success", model, FinishReason.FAILED)
        if isinstance(error, BrokenScores):
            self._store.increment("corrupted_requests", model)

    def request_abandoned(self, model: str, usage: Usage, phase: str) -> None:
        """Count a request whose client disconnected while it was queued, in prefill or in decode."""
        self._store.increment("request_success", model, FinishReason.CANCELLED)
        self._count_tokens(model, usage)
        self._store.increment("generation_tokens", model, by=usage.completion_tokens)
        self._aborted(model, phase)

    def request_finished(self, model: str, completion: Completion, params: SamplingParams, latency_s: float) -> None:
        """Count the answer to one prompt, with its alternatives."""
        store, usage = self._store, completion.usage
        store.histogram("e2e_request_latency_seconds", model).observe(latency_s)
        store.histogram("request_params_n", model).observe(params.n)
        if params.max_tokens is not None:
            store.histogram("request_params_max_tokens", model).observe(params.max_tokens)
        store.histogram("request_prompt_tokens", model).observe(usage.prompt_tokens)
        self._count_tokens(model, usage)
        for answer in (completion, *completion.alternatives):
            self._answered(model, answer)
        if completion.finish_reason is FinishReason.CANCELLED:
            self._aborted(model, _phase(completion))

    def embedded(self, model: str, num_tokens: int, latency_s: float) -> None:
        """Count a request for embeddings."""
        self._store.histogram("e2e_request_latency_seconds", model).observe(latency_s)
        self._store.histogram("request_prompt_tokens", model).observe(num_tokens)
        self._store.increment("prompt_tokens", model, by=num_tokens)
        self._store.increment("request_success", model, FinishReason.STOP)

    def searched(self, mode: str, seconds: float) -> None:
        """Count a search in a collection."""
        self._store.histogram("retrieval_search_seconds", mode).observe(seconds)

    def documents_added(self, num_documents: int, num_chunks: int) -> None:
        """Count what was put into a collection."""
        self._store.increment("retrieval_documents_added", by=num_documents)
        self._store.increment("retrieval_chunks_added", by=num_chunks)

    def update_collections(self, num_open: int, hot_hits: int, hot_misses: int) -> None:
        """Update the retrieval metrics; the counts are since the start."""
        self._store.set("retrieval_collections_open", to=num_open)
        self._store.set("retrieval_hot_hits", to=hot_hits)
        self._store.set("retrieval_hot_misses", to=hot_misses)

    def prefix_warmed(self) -> None:
        """Count a prompt whose prefix was computed before a request asked for it."""
        self._store.increment("retrieval_primed")

    def update_engine(self, model: str, stats: EngineStatsView, memory: Mapping[str, int]) -> None:
        """Update the metrics of an engine; memory: planned bytes by part."""
        last = self._engines.setdefault(model, LastPoll())
        store, now = self._store, _totals(stats)
        for name, total in now.items():
            store.increment(name, model, by=last.increase(name, total))
        for position, total in zip(DRAFT_POSITIONS, stats.accepted_per_position, strict=False):
            name = "spec_decode_num_accepted_tokens_per_pos"
            store.increment(name, model, position, by=last.increase(f"{name} {position}", total))
        for name, snapshot in stats.distributions.items():
            store.histogram(name, model).add(last.histogram_increase(name, snapshot))
        store.set("num_requests_running", model, to=stats.running)
        store.set("num_requests_waiting", model, to=stats.waiting)
        capacity = stats.waiting - stats.waiting_for_prompt
        store.set("num_requests_waiting_by_reason", model, "capacity", to=capacity)
        store.set("num_requests_waiting_by_reason", model, "prompt", to=stats.waiting_for_prompt)
        full = stats.blocks_used / max(1, stats.blocks_total)
        windows = stats.window_blocks_used / max(1, stats.window_blocks_total)
        store.set("kv_cache_usage_perc", model, to=max(full, windows))
        store.set("state_slots_total", model, to=stats.state_slots_total)
        store.set("state_slots_used", model, to=stats.state_slots_used)
        store.set("prefix_disk_bytes", model, to=stats.disk.num_bytes)
        store.remove("cache_config_info", model)
        store.set("cache_config_info", model, str(stats.block_size), str(stats.blocks_total), to=1.0)
        for part in MEMORY_PARTS:
            store.set("memory_budget_bytes", model, part, to=memory.get(part, 0))

    def _remove_engine(self, model: str) -> None:
        """Set the gauges of an unloaded model to 0; its counters stay."""
        if self._engines.pop(model, None) is None:
            return
        for name in ENGINE_GAUGES:
            self._store.set(name, model, to=0.0)
        for reason in ("capacity", "prompt"):
            self._store.set("num_requests_waiting_by_reason", model, reason, to=0.0)
        for part in MEMORY_PARTS:
            self._store.set("memory_budget_bytes", model, part, to=0.0)
        self._store.remove("cache_config_info", model)

    def remove_unloaded(self, loaded: Iterable[str]) -> None:
        """Set the gauges of all models that are no longer loaded to 0."""
        for model in self._engines.keys() - set(loaded):
            self._remove_engine(model)

    def render(self) -> bytes:
        """The text of one scrape."""
        self._store.set("cpu_throttled_seconds", to=max(0.0, cpu_throttled_s() - self._throttled_at_start_s))
        return render(self.registry)

    def _count_tokens(self, model: str, usage: Usage) -> None:
        self._store.increment("prompt_tokens", model, by=usage.prompt_tokens)
        self._store.increment("prompt_tokens_cached", model, by=usage.cached_tokens)

    def _aborted(self, model: str, phase: str) -> None:
        self._store.increment("cancelled", phase)
        self._store.increment("num_aborted_requests", model)

    def _answered(self, model: str, answer: Completion) -> None:
        store, timings, num_tokens = self._store, answer.timings, answer.usage.completion_tokens
        store.increment("request_success", model, answer.finish_reason)
        store.increment("generation_tokens", model, by=num_tokens)
        store.histogram("request_generation_tokens", model).observe(num_tokens)
        store.histogram("request_queue_time_seconds", model).observe(timings.queue_s)
        if num_tokens == 0:
            return
        store.histogram("time_to_first_token_seconds", model).observe(timings.first_token_s)
        store.histogram("request_prefill_time_seconds", model).observe(timings.prefill_s)
        store.histogram("request_decode_time_seconds", model).observe(timings.decode_s)
        if num_tokens > 1:
            store.histogram("request_time_per_output_token_seconds", model).observe(timings.decode_s / (num_tokens - 1))


def _phase(completion: Completion) -> str:
    """The phase in which a request was cancelled."""
    if completion.usage.completion_tokens:
        return "decode"
    return "prefill" if completion.timings.prefill_s > 0 else "queued"


def _totals(stats: EngineStatsView) -> dict[str, float]:
    return {
        "prefix_cache_queries": stats.prefix_query_tokens,
        "prefix_cache_hits": stats.prefix_hit_tokens,
        "num_preemptions": stats.preemptions,
        "dllm_denoise_steps": stats.denoise_steps,
        "evicted_tokens": stats.evictions * stats.block_size,
        **stats.draft_totals,
        "external_prefix_cache_queries": stats.disk.query_tokens,
        "external_prefix_cache_hits": stats.disk.hit_tokens,
        "prefix_disk_read_bytes": stats.disk.read_bytes,
        "prefix_disk_written_bytes": stats.disk.written_bytes,
        "prefix_disk_dropped_blocks": stats.disk.dropped_blocks,
    }
