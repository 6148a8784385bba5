"""Histograms with fixed bucket bounds, as Prometheus has them, and the bounds in use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
LONG_SECONDS = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)
TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0, 65_536.0)
COUNTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """counts[i] values were above bounds[i - 1] and at most bounds[i]; the last count is of those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def __sub__(self, earlier: HistogramSnapshot) -> HistogramSnapshot:
        """The values observed since an earlier snapshot."""
        assert self.bounds == earlier.bounds
        counts = tuple(now - before for now, before in zip(self.counts, earlier.counts, strict=True))
        return HistogramSnapshot(self.bounds, counts, self.total - earlier.total)

    @property
    def num_observed(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts per bucket. Written by one thread; observing costs less than a microsecond."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def add(self, snapshot: HistogramSnapshot) -> None:
        """Add the counts of another histogram."""
        assert snapshot.bounds == self._bounds
        for index, count in enumerate(snapshot.counts):
            self._counts[index] += count
        self._total += snapshot.total

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
