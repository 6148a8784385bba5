"""What a server counts: requests as they end, engines as they are seen now and then. For the event loop's thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kvarn.errors import BrokenScores
from kvarn.machine import cpu_throttled_s
from kvarn.observe.exposition import make_registry, render
from kvarn.observe.histogram import Histogram, HistogramSnapshot
from kvarn.observe.metric_definitions import PARTS
from kvarn.observe.metric_store import MetricStore
from kvarn.types import Completion, FinishReason, SamplingParams, Usage


class EngineFigures(Protocol):
    """kvarn.engine.stats.EngineStats, as metrics need it. Counts are since the engine's start."""

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
    def distributions(self) -> Mapping[str, HistogramSnapshot]: ...


class TrafficFigures(Protocol):
    """kvarn.server.http.traffic.Traffic, as metrics need it."""

    @property
    def num_open(self) -> int: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def num_refused(self) -> int: ...
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

    def __init__(self, models: Iterable[str] = (), *, tiers: Iterable[str] = (), compat: str = "") -> None:
        """compat="vllm" also tells what vLLM has under vLLM's own names."""
        self._store = MetricStore()
        self._store.begin({"model_name": tuple(models), "tier": tuple(tiers)})
        self._engines: dict[str, _Seen] = {}
        self._throttled_at_start_s = cpu_throttled_s()
        self.registry = make_registry(self._store, with_vllm=compat == "vllm")

    def http_seen(self, num_requests: int, traffic: TrafficFigures) -> None:
        """Take a moment of the HTTP side: requests being served, and what all connections have counted."""
        store = self._store
        store.set("http_requests_active", to=num_requests)
        store.set("http_connections_open", to=traffic.num_open)
        store.set("http_connections", to=traffic.num_accepted)
        store.set("http_connections_refused", to=traffic.num_refused)
        store.set("http_connections_dropped", to=traffic.num_dropped)
        store.set("http_received_bytes", to=traffic.num_received_bytes)
        store.set("http_sent_bytes", to=traffic.num_sent_bytes)
        for status, num_responses in traffic.responses.items():
            store.set("http_responses", str(status), to=num_responses)

    def request_refused(self, tier: str, reason: str) -> None:
        """A limit was met: requests, tokens, concurrency or queue."""
        self._store.count("rate_limited", tier, reason)

    def token_gaps(self, model: str) -> Histogram:
        """Where the seconds between two tokens of an answer are observed."""
        return self._store.distribution("inter_token_latency_seconds", model)

    def grammars_seen(self, model: str, compile_times: HistogramSnapshot, num_reused: int) -> None:
        """Take what a model's grammars have cost since it was loaded."""
        seen = self._engines.setdefault(model, _Seen())
        name = "grammar_compilation_time_seconds"
        self._store.distribution(name, model).add(seen.gained(name, compile_times))
        self._store.count("num_grammar_cache_hit", model, by=seen.gain("num_grammar_cache_hit", num_reused))

    def request_failed(self, model: str, error: BaseException) -> None:
        """A request ended without an answer through a fault of ours."""
        self._store.count("request_success", model, FinishReason.FAILED)
        if isinstance(error, BrokenScores):
            self._store.count("corrupted_requests", model)

    def request_abandoned(self, model: str, usage: Usage, phase: str) -> None:
        """A client left while its request was queued, in prefill or in decode."""
        self._store.count("request_success", model, FinishReason.CANCELLED)
        self._count_tokens(model, usage)
        self._store.count("generation_tokens", model, by=usage.completion_tokens)
        self._aborted(model, phase)

    def request_finished(self, model: str, completion: Completion, params: SamplingParams, latency_s: float) -> None:
        """Count the answer to one prompt, with its alternatives."""
        store, usage = self._store, completion.usage
        store.distribution("e2e_request_latency_seconds", model).observe(latency_s)
        store.distribution("request_params_n", model).observe(params.n)
        if params.max_tokens is not None:
            store.distribution("request_params_max_tokens", model).observe(params.max_tokens)
        store.distribution("request_prompt_tokens", model).observe(usage.prompt_tokens)
        self._count_tokens(model, usage)
        for answer in (completion, *completion.alternatives):
            self._answered(model, answer)
        if completion.finish_reason is FinishReason.CANCELLED:
            self._aborted(model, _phase(completion))

    def embedded(self, model: str, num_tokens: int, latency_s: float) -> None:
        """Count a request for embeddings."""
        self._store.distribution("e2e_request_latency_seconds", model).observe(latency_s)
        self._store.distribution("request_prompt_tokens", model).observe(num_tokens)
        self._store.count("prompt_tokens", model, by=num_tokens)
        self._store.count("request_success", model, FinishReason.STOP)

    def searched(self, mode: str, seconds: float) -> None:
        """Count a search in a collection."""
        self._store.distribution("retrieval_search_seconds", mode).observe(seconds)

    def documents_added(self, num_documents: int, num_chunks: int) -> None:
        """Count what was put into a collection."""
        self._store.count("retrieval_documents_added", by=num_documents)
        self._store.count("retrieval_chunks_added", by=num_chunks)

    def collections_seen(self, num_open: int, hot_hits: int, hot_misses: int) -> None:
        """Take a moment of all collections; the counts are since the start."""
        self._store.set("retrieval_collections_open", to=num_open)
        self._store.set("retrieval_hot_hits", to=hot_hits)
        self._store.set("retrieval_hot_misses", to=hot_misses)

    def primed(self) -> None:
        """Count a prompt that was computed before it was asked."""
        self._store.count("retrieval_primed")

    def engine_seen(self, model: str, figures: EngineFigures, memory: Mapping[str, int]) -> None:
        """Take a moment of an engine; memory: planned bytes by part."""
        seen = self._engines.setdefault(model, _Seen())
        store, now = self._store, _totals(figures)
        for name, total in now.items():
            store.count(name, model, by=seen.gain(name, total))
        for name, observed in figures.distributions.items():
            store.distribution(name, model).add(seen.gained(name, observed))
        store.set("num_requests_running", model, to=figures.running)
        store.set("num_requests_waiting", model, to=figures.waiting)
        capacity = figures.waiting - figures.waiting_for_prompt
        store.set("num_requests_waiting_by_reason", model, "capacity", to=capacity)
        store.set("num_requests_waiting_by_reason", model, "prompt", to=figures.waiting_for_prompt)
        store.set("kv_cache_usage_perc", model, to=figures.blocks_used / max(1, figures.blocks_total))
        store.forget("cache_config_info", model)
        store.set("cache_config_info", model, str(figures.block_size), str(figures.blocks_total), to=1.0)
        for part in PARTS:
            store.set("memory_budget_bytes", model, part, to=memory.get(part, 0))

    def engine_gone(self, model: str) -> None:
        """A model was unloaded: what it holds is 0, what it counted stays."""
        if self._engines.pop(model, None) is None:
            return
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            self._store.set(name, model, to=0.0)
        for reason in ("capacity", "prompt"):
            self._store.set("num_requests_waiting_by_reason", model, reason, to=0.0)
        for part in PARTS:
            self._store.set("memory_budget_bytes", model, part, to=0.0)
        self._store.forget("cache_config_info", model)

    def engines_left(self, loaded: Iterable[str]) -> None:
        """Forget what unloaded models hold."""
        for model in self._engines.keys() - set(loaded):
            self.engine_gone(model)

    def render(self) -> bytes:
        """The text of one scrape."""
        throttled_s = max(0.0, cpu_throttled_s() - self._throttled_at_start_s)
        self._store.set("cpu_throttled_seconds", to=throttled_s)
        return render(self.registry)

    def _count_tokens(self, model: str, usage: Usage) -> None:
        self._store.count("prompt_tokens", model, by=usage.prompt_tokens)
        self._store.count("prompt_tokens_cached", model, by=usage.cached_tokens)

    def _aborted(self, model: str, phase: str) -> None:
        self._store.count("cancelled", phase)
        self._store.count("num_aborted_requests", model)

    def _answered(self, model: str, answer: Completion) -> None:
        store, timings, num_tokens = self._store, answer.timings, answer.usage.completion_tokens
        store.count("request_success", model, answer.finish_reason)
        store.count("generation_tokens", model, by=num_tokens)
        store.distribution("request_generation_tokens", model).observe(num_tokens)
        store.distribution("request_queue_time_seconds", model).observe(timings.queue_s)
        if num_tokens == 0:
            return
        store.distribution("time_to_first_token_seconds", model).observe(timings.first_token_s)
        store.distribution("request_prefill_time_seconds", model).observe(timings.prefill_s)
        store.distribution("request_decode_time_seconds", model).observe(timings.decode_s)
        if num_tokens > 1:
            mean_s = timings.decode_s / (num_tokens - 1)
            store.distribution("request_time_per_output_token_seconds", model).observe(mean_s)


class _Seen:
    """What one engine had counted when it was last seen; an engine that counts less has been started anew."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._observed: dict[str, HistogramSnapshot] = {}

    def gain(self, name: str, total: float) -> float:
        before = self._totals.get(name, 0.0)
        self._totals[name] = total
        return total - before if total >= before else total

    def gained(self, name: str, observed: HistogramSnapshot) -> HistogramSnapshot:
        before = self._observed.get(name)
        self._observed[name] = observed
        is_newer = before is not None and observed.num_observed >= before.num_observed
        return observed - before if before is not None and is_newer else observed


def _phase(completion: Completion) -> str:
    """How far a cancelled request had come."""
    if completion.usage.completion_tokens:
        return "decode"
    return "prefill" if completion.timings.prefill_s > 0 else "queued"


def _totals(figures: EngineFigures) -> dict[str, float]:
    return {
        "prefix_cache_queries": figures.prefix_query_tokens,
        "prefix_cache_hits": figures.prefix_hit_tokens,
        "num_preemptions": figures.preemptions,
        "dllm_denoise_steps": figures.denoise_steps,
        "evicted_tokens": figures.evictions * figures.block_size,
    }
