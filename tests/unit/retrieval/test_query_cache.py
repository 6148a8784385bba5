"""Frequent queries: the count-min sketch, the cache, and when both expire."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from kvarn.retrieval.collection import Collection
from kvarn.retrieval.search.count_min import CountMinSketch
from kvarn.retrieval.search.query_cache import QueryCache
from kvarn.retrieval.types import Document
from tests.unit.retrieval.words import WordEmbedder


def test_an_estimate_is_never_too_low_and_seldom_too_high() -> None:
    sketch = CountMinSketch(width=512, clock=lambda: 0.0)
    rng = np.random.default_rng(0)
    asked = Counter(f"q{min(n, 5000)}" for n in rng.zipf(1.3, 5_000))
    for query, times in asked.items():
        for _ in range(times):
            sketch.add(query)
    errors = [sketch.estimate(query) - times for query, times in asked.items()]
    assert min(errors) > -1e-9
    assert np.mean(np.array(errors) > 5_000 * np.e / 512) < 0.02


def test_conservative_update_errs_less_than_the_plain_sketch() -> None:
    careful, plain = CountMinSketch(width=128, clock=lambda: 0.0), CountMinSketch(width=128, clock=lambda: 0.0)
    for number in range(2_000):
        careful.add(f"q{number}")
        plain._table[plain._rows, plain._columns(f"q{number}")] += 1
    assert sum(careful.estimate(f"q{n}") for n in range(2_000)) < 0.9 * sum(
        plain.estimate(f"q{n}") for n in range(2_000)
    )


def test_counts_halve_with_every_half_life_and_over_years() -> None:
    now = [0.0]
    sketch = CountMinSketch(half_life_s=10.0, clock=lambda: now[0])
    for _ in range(8):
        sketch.add("mill")
    now[0] = 10.0
    assert abs(sketch.estimate("mill") - 4.0) < 1e-9
    now[0] = 20.0
    assert abs(sketch.add("mill") - 3.0) < 1e-9
    now[0] = 1e9
    assert sketch.estimate("mill") < 1e-9
    assert abs(sketch.add("mill") - 1.0) < 1e-9


def test_only_repeated_queries_are_cached() -> None:
    cache: QueryCache[str] = QueryCache()
    assert cache.get("q", 1) is None
    assert not cache.put("q", 1, "answer")
    assert cache.get("q", 1) is None
    assert cache.put("q", 1, "answer")
    assert cache.get("q", 1) == "answer"
    assert cache.get("q", 2) is None
    assert (cache.counts.hits, cache.counts.misses, cache.counts.stale) == (1, 3, 1)
    assert cache.keys() == ["q"]


def test_the_cache_is_bounded() -> None:
    cache: QueryCache[int] = QueryCache(max_cached=3)
    for number in range(10):
        cache.get(f"q{number}", 1)
        cache.get(f"q{number}", 1)
        cache.put(f"q{number}", 1, number)
    assert set(cache.keys()) == {"q7", "q8", "q9"}


def test_a_cached_search_embeds_nothing_until_the_collection_changes(tmp_path: Path) -> None:
    embedder = WordEmbedder()
    with Collection("c", folder=tmp_path, model=embedder) as collection:
        collection.add([Document("a mill grinds grain", id="mill")])
        first = collection.search("what does a mill do?")
        assert collection.search("what does a mill do?") == first
        before = embedder.num_embedded
        assert collection.search("what does a  mill do?") == first
        assert embedder.num_embedded == before
        assert collection.search("what does a mill do?", k=3) is not None
        assert embedder.num_embedded == before + 1
        collection.add([Document("what does a mill do? it grinds", id="new")])
        assert collection.search("what does a mill do?")[0].document == "new"
