"""Series in the form Prometheus reads, through prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvarn.observe.histogram import HistogramSnapshot
from kvarn.observe.metric_definitions import MetricSpec
from kvarn.observe.metric_store import MetricStore

PREFIX = "kvarn_"
VLLM_PREFIX = "vllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VLLM_REASONS = {"cancelled": "abort", "deadline": "abort", "failed": "error"}


class SeriesCollector(Collector):
    """Tells a store under our names and, if asked to, what vLLM has under vLLM's."""

    def __init__(self, store: MetricStore, *, with_vllm: bool) -> None:
        self._store = store
        self._with_vllm = with_vllm

    def collect(self) -> Iterator[Metric]:
        for family in self._store.families:
            yield self._metric(family, PREFIX)
        for family in self._store.families if self._with_vllm else ():
            if family.is_vllms:
                yield self._metric(family, VLLM_PREFIX)

    def _metric(self, family: MetricSpec, prefix: str) -> Metric:
        name = prefix + family.name
        if family.kind == "histogram":
            histogram = HistogramMetricFamily(name, family.help, labels=family.labels)
            for labels, distribution in self._store.distributions(family):
                now = distribution.now()
                histogram.add_metric(labels, _buckets(now), now.total)
            return histogram
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = kind(name, family.help, labels=family.labels)
        for labels, number in _renamed(self._store, family, prefix):
            metric.add_metric(labels, number)
        return metric


def make_registry(store: MetricStore, *, with_vllm: bool) -> CollectorRegistry:
    """A registry of its own: nothing of the process's default one is told."""
    registry = CollectorRegistry()
    registry.register(SeriesCollector(store, with_vllm=with_vllm))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The text of one scrape."""
    return generate_latest(registry)


def _renamed(store: MetricStore, family: MetricSpec, prefix: str) -> Sequence[tuple[tuple[str, ...], float]]:
    """Numbers by label; reasons in vLLM's words where its name is used, those that become equal added up."""
    if prefix != VLLM_PREFIX or family.labels[-1] != "finished_reason":
        return list(store.numbers(family))
    sums: dict[tuple[str, ...], float] = {}
    for labels, number in store.numbers(family):
        told = (*labels[:-1], VLLM_REASONS.get(labels[-1], labels[-1]))
        sums[told] = sums.get(told, 0.0) + number
    return list(sums.items())


def _buckets(now: HistogramSnapshot) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    buckets, seen = [], 0
    for bound, count in zip([*map(str, now.bounds), "+Inf"], now.counts, strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    return buckets
