"""Block hashes and the prefix cache: lookup and publish."""

from __future__ import annotations

import random
import time

import pytest

from kvarn.kv.cache import KVCache
from kvarn.kv.prefix import BlockHasher, PrefixHit, PrefixIndex

KEY = b"a key for tests"
TOKENS = list(range(100, 113))  # three blocks of 4 and one token


def computed(cache: KVCache, sequence: str, token_ids: list[int], tenant: str = "") -> None:
    """As if the engine had computed these tokens."""
    assert cache.extend(sequence, len(token_ids)) is not None
    cache.publish(sequence, token_ids, tenant)


def digests(token_ids: list[int], key: bytes = KEY, tenant: str = "") -> list[bytes]:
    hasher = BlockHasher(4, key)
    return list(hasher.chain(hasher.root(tenant), token_ids, 0, len(token_ids)))


def test_a_digest_stands_for_all_tokens_before_it() -> None:
    first, second, third = digests(TOKENS)
    changed = digests([0, *TOKENS[1:]])
    assert len({first, second, third, *changed}) == 6
    assert digests([*TOKENS[:11], 0])[:2] == [first, second]


def test_digests_differ_between_tenants_and_between_keys() -> None:
    plain = set(digests(TOKENS))
    assert plain == set(digests(TOKENS))
    assert not plain & set(digests(TOKENS, tenant="other"))
    assert not plain & set(digests(TOKENS, key=b"another key"))


def test_each_process_draws_its_own_key() -> None:
    assert BlockHasher(4).root("") != BlockHasher(4).root("")


def test_a_tenant_can_have_any_name() -> None:
    roots = {BlockHasher(4, KEY).root(name) for name in ("", "a", "\0", "\ud800", "ü" * 10_000)}
    assert len(roots) == 5


def test_a_tenant_named_like_a_block_does_not_hash_like_it() -> None:
    hasher = BlockHasher(1, KEY)
    parent = b"p" * 32
    (block,) = hasher.chain(parent, [0x41414141], 0, 1)
    assert hasher.root("p" * 32 + "AAAA") != block


def test_the_chain_can_be_continued_where_it_was_left() -> None:
    hasher, whole = BlockHasher(4, KEY), digests(TOKENS)
    assert list(hasher.chain(whole[0], TOKENS, 4, len(TOKENS))) == whole[1:]


def test_lookup_finds_published_blocks() -> None:
    cache = KVCache(8, 4, hash_key=KEY)
    computed(cache, "a", TOKENS)
    hit = cache.lookup(TOKENS)
    assert hit.num_tokens == 12
    assert list(hit.block_ids) == cache.block_ids("a")[:3].tolist()
    cache.check()


def test_lookup_leaves_the_last_token_to_compute() -> None:
    cache = KVCache(8, 4)
    computed(cache, "a", TOKENS)
    assert cache.lookup(TOKENS[:12]).num_tokens == 8
    assert cache.lookup(TOKENS[:4]) == PrefixHit(0, ())
    assert cache.lookup(TOKENS[:1]) == cache.lookup([]) == PrefixHit(0, ())


def test_lookup_stops_at_the_first_block_that_differs() -> None:
    cache = KVCache(8, 4)
    computed(cache, "a", TOKENS)
    assert cache.lookup([*TOKENS[:5], 0, *TOKENS[6:]]).num_tokens == 4


def test_lookup_finds_what_a_released_sequence_left() -> None:
    cache = KVCache(8, 4)
    computed(cache, "a", TOKENS)
    cache.release("a")
    assert cache.num_free == 8
    assert cache.lookup(TOKENS).num_tokens == 12
    assert (cache.stats().cached, cache.stats().free) == (3, 5)


def test_a_tenant_never_sees_blocks_of_another() -> None:
    cache = KVCache(8, 4)
    computed(cache, "a", TOKENS, tenant="one")
    assert cache.lookup(TOKENS, "two").num_tokens == 0
    assert cache.lookup(TOKENS).num_tokens == 0
    assert cache.lookup(TOKENS, "one").num_tokens == 12


def test_a_sequence_of_one_tenant_is_not_published_for_another() -> None:
    cache = KVCache(8, 4)
    computed(cache, "a", TOKENS, tenant="one")
    cache.fork("b", "a")
    cache.extend("b", 4)
    with pytest.raises(AssertionError, match="another tenant"):
        cache.publish("b", [*TOKENS, 1, 2, 3, 4], "two")


def test_publishing_again_changes_nothing() -> None:
    cache = KVCache(8, 4)
    computed(cache, "a", TOKENS)
    before = cache.lookup(TOKENS)
    cache.publish("a", TOKENS)
    assert cache.lookup(TOKENS) == before


def test_publishing_token_by_token_finds_the_same_as_at_once() -> None:
    at_once, stepwise = KVCache(8, 4, hash_key=KEY), KVCache(8, 4, hash_key=KEY)
    computed(at_once, "a", TOKENS)
    for count in range(1, len(TOKENS) + 1):
        stepwise.extend("a", 1)
        stepwise.publish("a", TOKENS[:count])
    assert stepwise.lookup(TOKENS).digests == at_once.lookup(TOKENS).digests


def test_tokens_without_a_position_are_not_published() -> None:
    cache = KVCache(8, 4)
    cache.extend("a", 7)
    cache.publish("a", TOKENS)
    assert cache.lookup(TOKENS).num_tokens == 4


def test_the_first_of_two_equal_blocks_stays_the_published_one() -> None:
    cache = KVCache(8, 4)
    cache.extend("a", 13)
    cache.extend("b", 13)
    cache.publish("a", TOKENS)
    first = cache.lookup(TOKENS)
    cache.publish("b", TOKENS)
    assert cache.lookup(TOKENS) == first
    cache.check()


def test_equal_blocks_computed_at_the_same_time_are_held_once() -> None:
    cache = KVCache(64, 4)
    for index in range(16):
        assert cache.extend(f"s{index}", 13) == []
    for index in range(16):
        cache.publish(f"s{index}", TOKENS)
        cache.check()
    stats = cache.stats()
    assert (stats.used, stats.shared, stats.free) == (3 + 16, 3, 45)
    tables = [cache.block_ids(f"s{index}").tolist() for index in range(16)]
    assert all(table[:3] == tables[0][:3] for table in tables)
    assert len({table[3] for table in tables}) == 16


def test_an_evicted_block_is_not_found() -> None:
    cache = KVCache(4, 4)
    computed(cache, "a", TOKENS)
    cache.release("a")
    cache.extend("b", 8)  # one free block, one eviction: the tail
    assert cache.lookup(TOKENS).num_tokens == 8
    assert cache.stats().evictions == 1
    cache.check()


def test_statistics_count_lookups_and_the_tokens_taken_over() -> None:
    cache = KVCache(8, 4)
    computed(cache, "a", TOKENS)
    cache.fork("b", cache.lookup(TOKENS))
    cache.lookup([1, 2, 3, 4, 5])
    assert (cache.stats().lookups, cache.stats().hit_tokens) == (2, 12)


def test_check_notices_a_torn_index() -> None:
    cache = KVCache(8, 4)
    computed(cache, "a", TOKENS)
    digest, block_id = next(iter(cache._full.index._blocks.items()))
    cache._full.index._blocks[digest] = block_id + 1
    with pytest.raises(AssertionError, match="torn"):
        cache.check()


def test_check_notices_a_published_block_that_is_not_cacheable() -> None:
    cache = KVCache(8, 4)
    computed(cache, "a", TOKENS)
    cache._full.pool._is_cacheable[int(cache.block_ids("a")[0])] = False
    with pytest.raises(AssertionError, match="cacheable"):
        cache.check()


def test_the_index_refuses_a_second_block_for_one_digest() -> None:
    index = PrefixIndex()
    index.add(b"digest", 1)
    with pytest.raises(AssertionError, match="already published"):
        index.add(b"digest", 2)
    with pytest.raises(AssertionError, match="something else"):
        index.add(b"other", 1)


def test_lookup_of_8192_tokens_takes_less_than_two_milliseconds(patience: float) -> None:
    cache, rng = KVCache(600, 16), random.Random(1)
    token_ids = [rng.randrange(150_000) for _ in range(8_193)]
    computed(cache, "a", token_ids)
    best = min(_seconds(lambda: cache.lookup(token_ids)) for _ in range(20))
    assert cache.lookup(token_ids).num_tokens == 8_192
    assert best < 2e-3 * patience


def test_publishing_a_step_costs_the_same_however_long_the_sequence_is(patience: float) -> None:
    cache = KVCache(20_000, 16)
    token_ids = [index % 1_000 for index in range(160_000)]
    per_step = [_seconds_per_step(cache, token_ids, length) for length in (160, 128_000)]
    assert per_step[1] < 5 * patience * per_step[0] + 2e-6, f"{per_step} s per step"


def _seconds_per_step(cache: KVCache, token_ids: list[int], length: int) -> float:
    """Decode steps behind length tokens: extend by one and publish."""
    name, best = f"s{length}", float("inf")
    computed(cache, name, token_ids[:length])
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(160):
            cache.extend(name, 1)
            cache.publish(name, token_ids)
        best = min(best, time.perf_counter() - start)
    return best / 160


def _seconds(call: object) -> float:
    assert callable(call)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
