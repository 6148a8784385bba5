"""The k best of any number of scored chunks, in memory for k. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from kvarn.retrieval.types import Scored


def top_k(scored: Iterable[Scored], k: int) -> list[Scored]:
    """The k highest scores, best first; among equal scores the lower key first."""
    heap: list[tuple[float, int]] = []  # the worst kept one on top
    for key, score in scored:
        entry = (score, -key)
        if len(heap) < k:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)
    return [(-negative, score) for score, negative in sorted(heap, reverse=True)]
