"""The values behind the metrics: one store of counters, gauges and histograms by metric and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from kvarn.observe.histogram import Histogram, HistogramSnapshot
from kvarn.observe.metric_definitions import METRICS, MetricSpec

Labels = tuple[str, ...]


class MetricStore:
    """Plain dictionaries, so that counting costs next to nothing. For one thread."""

    def __init__(self, metrics: Sequence[MetricSpec] = METRICS) -> None:
        self.metrics = metrics
        self._by_name = {metric.name: metric for metric in metrics}
        self._values: dict[str, dict[Labels, float]] = {metric.name: {} for metric in metrics}
        self._histograms: dict[str, dict[Labels, Histogram]] = {metric.name: {} for metric in metrics}

    def start_at_zero(self, known: Mapping[str, Sequence[str]]) -> None:
        """Create every series whose label values are known beforehand."""
        for metric in self.metrics:
            values = [known.get(label, metric.values) for label in metric.labels]
            for labels in product(*values):
                if metric.kind == "histogram":
                    self.histogram(metric.name, *labels)
                else:
                    self._values[metric.name].setdefault(labels, 0.0)

    def increment(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter or gauge."""
        series = self._values[name]
        series[labels] = series.get(labels, 0.0) + by

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge, or a counter whose total is kept elsewhere."""
        self._values[name][labels] = to

    def remove(self, name: str, model: str) -> None:
        """Drop the series of one model."""
        self._values[name] = {labels: value for labels, value in self._values[name].items() if labels[0] != model}

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram of one series; hold on to it where it is used for every token."""
        series = self._histograms[name]
        found = series.get(labels)
        if found is None:
            found = series[labels] = Histogram(self._by_name[name].bounds)
        return found

    def values(self, metric: MetricSpec) -> Iterator[tuple[Labels, float]]:
        yield from self._values[metric.name].items()

    def histograms(self, metric: MetricSpec) -> Iterator[tuple[Labels, Histogram]]:
        yield from self._histograms[metric.name].items()


class LastPoll:
    """The totals of one engine at the last poll; an engine with smaller totals has been restarted."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._snapshots: dict[str, HistogramSnapshot] = {}

    def increase(self, name: str, total: float) -> float:
        before = self._totals.get(name, 0.0)
        self._totals[name] = total
        return total - before if total >= before else total

    def histogram_increase(self, name: str, snapshot: HistogramSnapshot) -> HistogramSnapshot:
        before = self._snapshots.get(name)
        self._snapshots[name] = snapshot
        is_newer = before is not None and snapshot.num_observed >= before.num_observed
        return snapshot - before if before is not None and is_newer else snapshot
