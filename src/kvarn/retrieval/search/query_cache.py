"""The cache of query results: frequent queries are answered from memory until the collection changes.

Knows keys, versions and counts; knows no index.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvarn.retrieval.search.count_min import CountMinSketch

T = TypeVar("T")
MIN_COUNT = 2.0  # queries of one key, decayed, from which on its result is cached
MAX_CACHED = 512


@dataclass(slots=True)
class QueryCounts:
    """Counters for the metrics."""

    hits: int = 0
    misses: int = 0
    stale: int = 0  # misses that would have hit if the collection had not changed


class QueryCache(Generic[T]):
    """Results of frequent queries by key and version. May be used from several threads."""

    def __init__(self, frequencies: CountMinSketch | None = None, max_cached: int = MAX_CACHED) -> None:
        self.counts = QueryCounts()
        self._frequencies = frequencies or CountMinSketch()
        self._max_cached = max_cached
        self._cached: OrderedDict[str, tuple[Hashable, T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str, version: Hashable) -> T | None:
        """Count a query; its result if it is cached at this version."""
        with self._lock:
            self._frequencies.add(key)
            cached = self._cached.get(key)
            if cached is None or cached[0] != version:
                self.counts.misses += 1
                self.counts.stale += cached is not None
                return None
            self.counts.hits += 1
            self._cached.move_to_end(key)
            return cached[1]

    def put(self, key: str, version: Hashable, result: T) -> bool:
        """Cache a result if its query is frequent; returns whether it is."""
        with self._lock:
            if self._frequencies.estimate(key) < MIN_COUNT - 0.5:  # half a count for the decay since the first query
                return False
            self._cached[key] = (version, result)
            self._cached.move_to_end(key)
            while len(self._cached) > self._max_cached:
                self._cached.popitem(last=False)
            return True

    def __contains__(self, key: str) -> bool:
        """Whether a result is cached, of any version."""
        with self._lock:
            return key in self._cached

    def keys(self) -> list[str]:
        """The cached keys, the most frequent first."""
        with self._lock:
            return sorted(self._cached, key=self._frequencies.estimate, reverse=True)


def cache_key(query: str, options: object) -> str:
    """A text that is equal for searches with equal results; white space does not matter."""
    return json.dumps([" ".join(query.split()), repr(options)])
