"""The map of blocks says what the cache's own counts say, after any sequence of operations."""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np

from kvarn.kv.cache import KVCache
from kvarn.kv.pool import CACHED, FREE, HELD, SHARED
from kvarn.server.live.frames import run_lengths


def test_the_states_of_blocks_are_the_counts_of_the_cache() -> None:
    cache, random_source, alive = KVCache(24, 4), random.Random(5), []
    seen: Counter[int] = Counter()
    for number in range(300):
        name, prompt = f"s{number}", [random_source.randrange(2) for _ in range(random_source.randint(2, 20))]
        hit = cache.lookup(prompt)
        cache.fork(name, hit)
        if cache.extend(name, len(prompt) - hit.num_tokens) is None:
            cache.release(name)
        else:
            cache.publish(name, prompt)
            alive.append(name)
        while len(alive) > random_source.randint(0, 4):
            cache.release(alive.pop(random_source.randrange(len(alive))))
        states, stats = cache.groups[0].pool.states(), cache.stats()
        counted = Counter(states.tolist())
        assert counted[FREE] == stats.free
        assert counted[CACHED] == stats.cached
        assert counted[SHARED] == stats.shared
        assert counted[HELD] + counted[SHARED] == stats.used
        seen += counted
    assert set(seen) == {FREE, CACHED, HELD, SHARED}


def test_runs_give_the_states_back() -> None:
    states = np.array([0, 0, 0, 2, 4, 4, 1, 3, 3, 0], np.uint8)
    runs = run_lengths(states)
    assert runs == "f3u1o2c1s2f1"
    assert "".join(letter * int(length) for letter, length in re.findall(r"([a-z])(\d+)", runs)) == "fffuoocssf"
    assert run_lengths(np.array([], np.uint8)) == ""
