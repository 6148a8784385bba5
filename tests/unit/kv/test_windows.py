"""Blocks of layers that keep a window: what is freed, what stays findable, and where a prefix can be taken over."""

from __future__ import annotations

from kvarn.kv.cache import KVCache
from kvarn.kv.group import WindowShape

TOKENS = list(range(100, 164))


def cache_of(num_window_blocks: int = 8, window: int = 8) -> KVCache:
    return KVCache(16, 4, window=WindowShape(window, num_window_blocks, step_tokens=4))


def computed(cache: KVCache, name: str, num_tokens: int, token_ids: list[int] = TOKENS) -> None:
    """Extend a sequence as an engine does: commit after every step."""
    while (held := cache.num_tokens(name)) < num_tokens:
        assert cache.extend(name, min(4, num_tokens - held)) is not None
        cache.publish(name, token_ids, num_computed=cache.num_tokens(name))
        cache.advance(name, cache.num_tokens(name))
        cache.check()


def window_ids(cache: KVCache, name: str) -> list[int]:
    ids = cache.window_ids(name)
    assert ids is not None
    return ids.tolist()


def test_a_sequence_holds_the_blocks_of_its_window() -> None:
    cache = cache_of(num_window_blocks=4)
    computed(cache, "a", 64)
    ids = window_ids(cache, "a")
    assert [block_id < 0 for block_id in ids] == [True] * 13 + [False] * 3  # 64 - 8 - 1 lies in block 13
    assert (cache.block_ids("a") >= 0).all()
    assert cache.stats(1).used == 3


def test_what_is_planned_frees_nothing() -> None:
    cache = cache_of(num_window_blocks=16)
    cache.extend("a", 60)
    assert min(window_ids(cache, "a")) >= 0
    cache.trim("a", 4)
    cache.check()


def test_extend_changes_nothing_when_one_group_has_no_room() -> None:
    cache = cache_of(num_window_blocks=4)
    assert cache.extend("a", 17) is None
    assert (cache.num_tokens("a"), cache.num_free, cache.stats(1).used) == (0, 16, 0)
    cache.check()


def test_a_hit_ends_where_its_window_is_whole() -> None:
    cache = cache_of(num_window_blocks=16)
    computed(cache, "a", 40)
    cache.release("a")
    assert cache.lookup(TOKENS).num_tokens == 40
    assert cache.lookup([*TOKENS[:22], 0]).num_tokens == 20  # cached blocks in front of the last window
    window = cache.groups[1]
    cached = window.pool.cached_ids
    window.unpublish(next(b for b in cached if window.index.digest_of(b) == cache.lookup(TOKENS).digests[8]))
    hit = cache.lookup(TOKENS)
    assert (hit.num_tokens, hit.num_matched) == (32, 40)
    cache.fork("b", hit)
    assert [block_id < 0 for block_id in window_ids(cache, "b")] == [True] * 6 + [False] * 2
    cache.check()


def test_a_fork_copies_the_partial_block_of_every_group() -> None:
    cache = cache_of()
    computed(cache, "a", 18)
    assert cache.can_fork("a", 17)
    assert not cache.can_fork("a", 3)
    cache.fork("b", "a", 17)
    copies = cache.extend("b", 1)
    assert copies is not None
    assert [(copy.group, copy.num_tokens) for copy in copies] == [(0, 1), (1, 1)]
    cache.check()


def test_an_evicted_block_is_forgotten_in_the_windows_too() -> None:
    cache = cache_of(num_window_blocks=16)
    computed(cache, "a", 32)
    cache.release("a")
    cache.reclaim(drop_cached=True)
    assert cache.stats(1).cached == 0
    assert len(cache.reclaim(group=1)) > 0
    cache.check()


def test_blocks_that_were_freed_on_the_way_are_forgotten_with_their_request() -> None:
    cache = cache_of(num_window_blocks=16)
    computed(cache, "a", 40)
    cache.release("a", unpublish=True)
    assert cache.stats(1).cached == 0
    assert cache.lookup(TOKENS).num_matched == 0
    cache.check()


def test_a_long_prompt_evicts_what_it_has_passed_itself() -> None:
    cache = KVCache(64, 4, window=WindowShape(8, 14, step_tokens=4))
    computed(cache, "short", 16)
    cache.release("short")
    computed(cache, "first", 16, TOKENS[32:])
    cache.release("first")
    cache.fork("second", cache.lookup(TOKENS[32:49]))  # a beginning that two have in common, and both go on
    computed(cache, "second", 32, TOKENS[32:])
    cache.release("second")
    computed(cache, "long", 64, TOKENS[::-1])
    assert cache.stats(1).evictions > 8
    assert [cache.lookup(ids).num_tokens for ids in (TOKENS[:17], TOKENS[32:49])] == [16, 16]
