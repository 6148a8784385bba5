"""Hot queries: what is asked again and again is answered from memory, as long as the collection has not changed."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvarn.retrieval.search.count_min import CountMinSketch

T = TypeVar("T")
HOT = 2.0  # asked about this often within the sketch's half-life
MAX_CACHED = 512
Clock = Callable[[], float]


@dataclass(slots=True)
class QueryCounts:
    """What the metrics tell."""

    hits: int = 0
    misses: int = 0
    stale: int = 0  # would have hit, but the collection had changed


class QueryCache(Generic[T]):
    """Results of hot questions by question and version. Safe to use from several threads."""

    def __init__(self, sketch: CountMinSketch | None = None, max_cached: int = MAX_CACHED) -> None:
        self.counts = QueryCounts()
        self._sketch = sketch or CountMinSketch()
        self._max_cached = max_cached
        self._cached: OrderedDict[str, tuple[Hashable, T]] = OrderedDict()
        self._lock = threading.Lock()

    def ask(self, question: str, version: Hashable) -> T | None:
        """Count a question; its result if that is known at this version."""
        with self._lock:
            self._sketch.add(question)
            found = self._cached.get(question)
            if found is None or found[0] != version:
                self.counts.misses += 1
                self.counts.stale += found is not None
                return None
            self.counts.hits += 1
            self._cached.move_to_end(question)
            return found[1]

    def tell(self, question: str, version: Hashable, result: T) -> bool:
        """Keep a result if its question is hot; whether it was."""
        with self._lock:
            if self._sketch.estimate(question) < HOT - 0.5:  # half a count for the decay since the first time
                return False
            self._cached[question] = (version, result)
            self._cached.move_to_end(question)
            while len(self._cached) > self._max_cached:
                self._cached.popitem(last=False)
            return True

    def has(self, question: str) -> bool:
        """Whether a question is hot and its result kept."""
        with self._lock:
            return question in self._cached

    def questions(self) -> list[str]:
        """The hot questions that are cached, the hottest first."""
        with self._lock:
            return sorted(self._cached, key=self._sketch.estimate, reverse=True)


def question_of(query: str, **how: Any) -> str:
    """A text that is equal for equal searches."""
    return json.dumps([" ".join(query.split()), how], sort_keys=True, default=_plain)


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else repr(value)
