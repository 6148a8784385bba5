"""Fork, copy-on-write, roll back into published blocks, unpublish and reclaim."""

from __future__ import annotations

import pytest

from kvarn.backends.batch import BlockCopy
from kvarn.kv.cache import KVCache

TOKENS = list(range(100, 113))  # three blocks of 4 and one token


def computed(num_blocks: int = 8, num_tokens: int = 13) -> KVCache:
    """A cache where sequence a has computed and published the first of TOKENS."""
    cache = KVCache(num_blocks, 4)
    assert cache.extend("a", num_tokens) == []
    cache.publish("a", TOKENS[:num_tokens])
    return cache


def ids(cache: KVCache, sequence: str) -> list[int]:
    block_ids: list[int] = cache.block_ids(sequence).tolist()
    return block_ids


def test_fork_shares_every_block() -> None:
    cache = computed()
    cache.fork("b", "a")
    assert ids(cache, "b") == ids(cache, "a")
    assert cache.num_tokens("b") == 13
    assert cache.stats().used == cache.stats().shared == 4
    cache.check()


def test_fork_copies_only_the_partial_block() -> None:
    cache = computed()
    cache.fork("b", "a")
    before = ids(cache, "b")
    assert cache.extend("b", 6) == [BlockCopy(before[3], ids(cache, "b")[3], 1)]
    assert ids(cache, "b")[:3] == ids(cache, "a")[:3]
    assert ids(cache, "a") == before
    assert len({*ids(cache, "a"), *ids(cache, "b")}) == 6
    cache.check()


def test_the_last_holder_of_a_partial_block_writes_it_in_place() -> None:
    cache = computed()
    cache.fork("b", "a")
    cache.extend("b", 1)
    assert cache.extend("a", 1) == []
    assert cache.extend("b", 1) == []


def test_a_fork_at_the_edge_of_a_block_copies_nothing() -> None:
    cache = computed()
    cache.fork("b", "a", 8)
    assert ids(cache, "b") == ids(cache, "a")[:2]
    assert cache.extend("b", 3) == []
    cache.check()


def test_a_fork_inside_a_full_block_copies_its_first_tokens() -> None:
    cache = computed()
    cache.fork("b", "a", 6)
    (copy,) = cache.extend("b", 1) or []
    assert copy == BlockCopy(ids(cache, "a")[1], ids(cache, "b")[1], 2)
    cache.check()


def test_an_extension_by_nothing_copies_nothing() -> None:
    cache = computed()
    cache.fork("b", "a")
    assert cache.extend("b", 0) == []
    assert ids(cache, "b") == ids(cache, "a")


def test_a_copy_without_room_is_refused_and_changes_nothing() -> None:
    cache = computed(num_blocks=4)
    cache.fork("b", "a")
    assert cache.extend("b", 1) is None
    assert ids(cache, "b") == ids(cache, "a")
    assert cache.num_tokens("b") == 13
    assert cache.lookup(TOKENS).num_tokens == 12
    cache.check()


def test_fork_from_a_hit_takes_cached_blocks_back_into_use() -> None:
    cache = computed()
    cache.release("a")
    hit = cache.lookup(TOKENS)
    cache.fork("b", hit)
    assert tuple(ids(cache, "b")) == hit.block_ids
    assert (cache.num_tokens("b"), cache.num_free, cache.stats().cached) == (12, 5, 0)
    cache.check()


def test_fork_from_an_empty_hit_starts_an_empty_sequence() -> None:
    cache = computed()
    cache.fork("b", cache.lookup([1, 2, 3, 4, 5]))
    assert cache.num_tokens("b") == 0
    assert cache.extend("b", 5) == []
    cache.check()


def test_fork_from_a_part_of_a_hit_holds_only_that_part() -> None:
    cache = computed()
    cache.release("a")
    cache.fork("b", cache.lookup(TOKENS), 4)
    assert (cache.num_tokens("b"), cache.stats().used, cache.stats().cached) == (4, 1, 2)
    cache.check()


def test_a_stale_hit_is_refused() -> None:
    cache = computed(num_blocks=4)
    cache.release("a")
    hit = cache.lookup(TOKENS)
    cache.extend("b", 16)
    cache.release("b")
    with pytest.raises(AssertionError, match="stale"):
        cache.fork("c", hit)
    assert cache.num_tokens("c") == 0
    cache.check()


def test_fork_onto_a_sequence_that_holds_blocks_is_refused() -> None:
    cache = computed()
    cache.extend("b", 1)
    with pytest.raises(AssertionError, match="already holds"):
        cache.fork("b", "a")
    cache.check()


def test_a_fork_publishes_what_it_adds_to_the_shared_prefix() -> None:
    cache = computed()
    cache.fork("b", "a")
    cache.extend("b", 4)
    longer = [*TOKENS, 7, 7, 7, 7]
    cache.publish("b", longer)
    assert cache.lookup(longer).num_tokens == 16
    assert cache.lookup([*TOKENS, 8, 8, 8, 8]).num_tokens == 12


def test_trimmed_blocks_stay_findable() -> None:
    cache = computed()
    cache.trim("a", 4)
    assert cache.lookup(TOKENS).num_tokens == 12
    assert cache.stats().cached == 2
    cache.check()


def test_rewriting_inside_a_published_block_copies_it_and_keeps_the_original() -> None:
    cache = computed()
    original = cache.lookup(TOKENS)
    cache.trim("a", 6)
    (copy,) = cache.extend("a", 7) or []
    assert (copy.source, copy.num_tokens) == (original.block_ids[1], 2)
    assert copy.source not in ids(cache, "a")
    rewritten = [*TOKENS[:6], *range(7)]
    cache.publish("a", rewritten)
    assert cache.lookup(TOKENS) == original
    assert cache.lookup(rewritten).block_ids == tuple(ids(cache, "a")[:3])
    cache.check()


def test_rewriting_inside_a_published_block_without_room_unpublishes_it() -> None:
    cache = computed(num_blocks=3, num_tokens=12)
    cache.trim("a", 6)
    cache.extend("b", 4)
    assert cache.num_free == 0
    before = ids(cache, "a")
    assert cache.extend("a", 2) == []
    assert ids(cache, "a") == before
    assert cache.lookup(TOKENS).num_tokens == 4
    cache.check()


def test_an_extension_that_does_not_fit_unpublishes_nothing() -> None:
    cache = computed(num_blocks=3, num_tokens=12)
    cache.trim("a", 10)
    assert cache.extend("a", 3) is None
    assert cache.lookup([*TOKENS[:12], 0]).num_tokens == 12
    cache.check()


def test_rewriting_inside_a_block_another_sequence_published_copies_it() -> None:
    cache = KVCache(8, 4)
    cache.extend("a", 8)
    cache.fork("b", "a", 6)
    cache.publish("a", TOKENS[:8])
    cache.release("a")
    (copy,) = cache.extend("b", 2) or []
    assert copy.num_tokens == 2
    assert cache.lookup(TOKENS).num_tokens == 8
    cache.check()


def test_released_blocks_stay_findable_unless_they_are_unpublished() -> None:
    cache = computed()
    cache.release("a", unpublish=True)
    assert cache.lookup(TOKENS).num_tokens == 0
    assert (cache.num_free, cache.stats().cached) == (8, 0)
    cache.check()


def test_unpublishing_leaves_blocks_that_others_hold() -> None:
    cache = computed()
    cache.fork("b", "a", 4)
    cache.release("a", unpublish=True)
    assert cache.lookup(TOKENS).num_tokens == 4
    cache.check()


def test_unpublishing_an_unknown_sequence_is_nothing() -> None:
    cache = computed()
    cache.release("nobody", unpublish=True)
    assert cache.lookup(TOKENS).num_tokens == 12
    cache.check()


def test_reclaim_returns_free_blocks_once_and_spares_cached_ones() -> None:
    cache = computed()
    published, last = ids(cache, "a")[:3], ids(cache, "a")[3]
    cache.release("a")
    assert cache.reclaim() == [last]
    assert cache.reclaim() == []
    assert cache.lookup(TOKENS).num_tokens == 12
    assert cache.reclaim(drop_cached=True) == sorted(published)
    assert cache.lookup(TOKENS).num_tokens == 0
    assert cache.num_free == 8
    cache.check()


def test_reclaim_leaves_held_blocks_alone() -> None:
    cache = computed()
    assert cache.reclaim(drop_cached=True) == []
    assert cache.lookup(TOKENS).num_tokens == 12


def test_a_block_used_after_reclaim_is_returned_again() -> None:
    cache = computed()
    cache.release("a", unpublish=True)
    assert len(cache.reclaim()) == 4
    cache.extend("b", 4)
    used = ids(cache, "b")
    cache.release("b")
    assert cache.reclaim() == used


def test_statistics_add_up() -> None:
    cache = computed(num_blocks=10)
    cache.fork("b", "a")
    cache.extend("c", 5)
    cache.publish("c", [1, 2, 3, 4, 5])
    cache.release("c")
    stats = cache.stats()
    assert (stats.used, stats.cached, stats.free, stats.shared) == (4, 1, 5, 4)
    assert stats.used + stats.cached + stats.free == stats.num_blocks == 10
    assert cache.num_free == stats.cached + stats.free
    assert stats.unused_slots == 3 + 3
    assert stats.evictions == 0
