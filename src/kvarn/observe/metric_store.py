"""The numbers behind the metrics: one store of counters, gauges and distributions by family and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from kvarn.observe.histogram import Histogram
from kvarn.observe.metric_definitions import FAMILIES, MetricSpec

Labels = tuple[str, ...]


class MetricStore:
    """Plain dictionaries, so that counting costs next to nothing. For one thread."""

    def __init__(self, families: Sequence[MetricSpec] = FAMILIES) -> None:
        self.families = families
        self._by_name = {family.name: family for family in families}
        self._numbers: dict[str, dict[Labels, float]] = {family.name: {} for family in families}
        self._distributions: dict[str, dict[Labels, Histogram]] = {family.name: {} for family in families}

    def begin(self, known: Mapping[str, Sequence[str]]) -> None:
        """Start every series at 0 whose labels are known beforehand."""
        for family in self.families:
            values = [known.get(label, family.values) for label in family.labels]
            for labels in product(*values):
                if family.kind == "histogram":
                    self.distribution(family.name, *labels)
                else:
                    self._numbers[family.name].setdefault(labels, 0.0)

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter or gauge."""
        series = self._numbers[name]
        series[labels] = series.get(labels, 0.0) + by

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge, or a counter that somebody else keeps."""
        self._numbers[name][labels] = to

    def forget(self, name: str, model: str) -> None:
        """Drop the series of one model."""
        self._numbers[name] = {labels: value for labels, value in self._numbers[name].items() if labels[0] != model}

    def distribution(self, name: str, *labels: str) -> Histogram:
        """The distribution of one series; hold on to it where it is used for every token."""
        series = self._distributions[name]
        found = series.get(labels)
        if found is None:
            found = series[labels] = Histogram(self._by_name[name].bounds)
        return found

    def numbers(self, family: MetricSpec) -> Iterator[tuple[Labels, float]]:
        yield from self._numbers[family.name].items()

    def distributions(self, family: MetricSpec) -> Iterator[tuple[Labels, Histogram]]:
        yield from self._distributions[family.name].items()
