"""The metric store in the text format of Prometheus, through prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvarn.observe.histogram import HistogramSnapshot
from kvarn.observe.metric_definitions import MetricSpec
from kvarn.observe.metric_store import MetricStore

PREFIX = "kvarn_"
VLLM_PREFIX = "vllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VLLM_REASONS = {"cancelled": "abort", "deadline": "abort", "failed": "error"}


class StoreCollector(Collector):
    """Exposes a store under our names and, if asked to, the metrics vLLM has also under vLLM's names."""

    def __init__(self, store: MetricStore, *, with_vllm: bool) -> None:
        self._store = store
        self._with_vllm = with_vllm

    def collect(self) -> Iterator[Metric]:
        for spec in self._store.metrics:
            yield self._metric(spec, PREFIX)
        for spec in self._store.metrics if self._with_vllm else ():
            if spec.in_vllm:
                yield self._metric(spec, VLLM_PREFIX)

    def _metric(self, spec: MetricSpec, prefix: str) -> Metric:
        name = prefix + spec.name
        if spec.kind == "histogram":
            histogram = HistogramMetricFamily(name, spec.help, labels=spec.labels)
            for labels, series in self._store.histograms(spec):
                snapshot = series.snapshot()
                histogram.add_metric(labels, _buckets(snapshot), snapshot.total)
            return histogram
        kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        metric = kind(name, spec.help, labels=spec.labels)
        for labels, value in _values(self._store, spec, prefix):
            metric.add_metric(labels, value)
        return metric


def make_registry(store: MetricStore, *, with_vllm: bool) -> CollectorRegistry:
    """Make a registry of our own: of the process's default one only its memory, CPU time and open files are exposed."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(store, with_vllm=with_vllm))
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The text of one scrape."""
    return generate_latest(registry)


def _values(store: MetricStore, spec: MetricSpec, prefix: str) -> Sequence[tuple[tuple[str, ...], float]]:
    """Values by labels; under vLLM's names with vLLM's finish reasons, those that become equal added up."""
    if prefix != VLLM_PREFIX or spec.labels[-1] != "finished_reason":
        return list(store.values(spec))
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in store.values(spec):
        renamed = (*labels[:-1], VLLM_REASONS.get(labels[-1], labels[-1]))
        sums[renamed] = sums.get(renamed, 0.0) + value
    return list(sums.items())


def _buckets(snapshot: HistogramSnapshot) -> list[tuple[str, float]]:
    """Cumulative counts, as Prometheus wants them."""
    buckets, cumulative = [], 0
    for bound, count in zip([*map(str, snapshot.bounds), "+Inf"], snapshot.counts, strict=True):
        cumulative += count
        buckets.append((bound, float(cumulative)))
    return buckets
