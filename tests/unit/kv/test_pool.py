"""The block pool: references, the order of eviction, memory given back, and constant cost."""

from __future__ import annotations

import random
import time

import pytest

from kvarn.kv.pool import BlockPool


def cached(pool: BlockPool, num_blocks: int) -> list[int]:
    """Blocks of one sequence, allocated, marked as cacheable and released."""
    block_ids = [pool.allocate() for _ in range(num_blocks)]
    for block_id in block_ids:
        pool.mark_cacheable(block_id)
    pool.release(block_ids)
    return block_ids


def test_blocks_without_content_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    cacheable = cached(pool, 2)
    plain = [pool.allocate(), pool.allocate()]
    assert not set(plain) & set(cacheable)
    assert pool.num_evictions == 0
    pool.release(plain)
    assert {pool.allocate(), pool.allocate()} == set(plain)
    assert pool.num_evictions == 0
    assert pool.allocate() in cacheable
    assert pool.num_evictions == 1


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    block_ids = cached(pool, 4)
    assert [pool.allocate() for _ in range(4)] == list(reversed(block_ids))


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, new = cached(pool, 2), cached(pool, 2)
    pool.share(old)
    pool.release(old)
    assert [pool.allocate() for _ in range(4)] == [*reversed(new), *reversed(old)]


def test_a_shared_head_outlives_every_tail_behind_it() -> None:
    pool = BlockPool(3)
    head, tail, other_tail = (pool.allocate() for _ in range(3))
    for block_id in (head, tail, other_tail):
        pool.mark_cacheable(block_id)
    pool.share([head])
    pool.release([head, tail])
    pool.release([head, other_tail])
    assert [pool.allocate() for _ in range(3)] == [tail, other_tail, head]


def test_kept_blocks_are_evicted_after_all_others_and_are_still_given() -> None:
    pool = BlockPool(16)
    kept, others = cached(pool, 4), cached(pool, 12)
    pool.keep(kept)
    assert pool.num_free == 16
    taken = [pool.allocate() for _ in range(16)]
    assert taken == [*reversed(others), *reversed(kept)]
    assert pool.num_kept == 0
    pool.check(taken)


def test_at_most_a_quarter_is_kept_and_the_newest_stay() -> None:
    pool = BlockPool(16)
    old, new, long = cached(pool, 3), cached(pool, 3), cached(pool, 10)
    pool.keep(old)
    pool.keep(new)
    assert pool.num_kept == 4
    taken = [pool.allocate() for _ in range(12)]
    assert set(taken) == {*long, *old[1:]}  # the front of the old prefix is kept longest
    pool.keep(new)
    assert pool.allocate() == old[0]
    pool.release(taken)
    pool.check([old[0]])


def test_of_a_prefix_longer_than_that_the_front_is_kept() -> None:
    pool = BlockPool(16)
    block_ids = cached(pool, 8)
    pool.keep(block_ids)
    assert [pool.allocate() for _ in range(12)][8:] == list(reversed(block_ids[4:]))


def test_a_block_in_use_is_kept_when_it_becomes_free() -> None:
    pool = BlockPool(8)
    block_ids = cached(pool, 2)
    pool.share(block_ids)
    pool.keep(block_ids)
    others = cached(pool, 6)
    pool.release(block_ids)
    assert [pool.allocate() for _ in range(6)] == list(reversed(others))
    pool.unmark_cacheable(block_ids[0])
    assert pool.num_kept == 1
    assert pool.allocate() == block_ids[0]
    assert pool.allocate() == block_ids[1]


def test_sharing_takes_a_cached_block_out_of_the_evictable_ones() -> None:
    pool = BlockPool(2)
    block_ids = cached(pool, 2)
    pool.share(block_ids[:1])
    assert pool.num_free == 1
    assert pool.allocate() == block_ids[1]
    pool.check(block_ids)


def test_shared_blocks_are_counted_once_however_many_share_them() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.share([block_id])
    pool.share([block_id])
    assert pool.num_shared == 1
    pool.release([block_id])
    assert pool.num_shared == 1
    pool.release([block_id])
    assert pool.num_shared == 0
    pool.check([block_id])


def test_warm_memory_is_used_again_before_new_memory() -> None:
    pool = BlockPool(100)
    block_id = pool.allocate()
    pool.release([block_id])
    assert pool.allocate() == block_id


def test_untouched_blocks_have_no_memory_to_give_back() -> None:
    assert BlockPool(5).reclaim() == []


def test_a_block_is_reclaimed_once_until_it_is_used_again() -> None:
    pool = BlockPool(3)
    block_ids = [pool.allocate() for _ in range(3)]
    pool.release(block_ids[:2])
    assert pool.reclaim() == sorted(block_ids[:2])
    assert pool.reclaim() == []
    again = pool.allocate()
    pool.release([again])
    assert pool.reclaim() == [again]
    pool.check(block_ids[2:])


def test_cached_blocks_are_not_reclaimed_until_they_are_unmarked() -> None:
    pool = BlockPool(3)
    block_ids = cached(pool, 2)
    assert pool.reclaim() == []
    pool.unmark_cacheable(block_ids[0])
    assert pool.reclaim() == [block_ids[0]]
    assert pool.cached_ids == [block_ids[1]]
    pool.check([])


def test_a_block_unmarked_while_held_is_not_cached_when_it_becomes_free() -> None:
    pool = BlockPool(1)
    block_id = pool.allocate()
    pool.mark_cacheable(block_id)
    pool.unmark_cacheable(block_id)
    pool.release([block_id])
    assert pool.num_cached == 0
    pool.check([])


def test_releasing_a_free_block_is_refused() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.release([block_id])
    with pytest.raises(AssertionError, match="released while free"):
        pool.release([block_id])


@pytest.mark.parametrize("place", ["_idle", "_returned"])
def test_check_notices_a_block_that_is_free_and_referenced(place: str) -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    getattr(pool, place).append(block_id)
    with pytest.raises(AssertionError, match="free blocks and counts disagree"):
        pool.check([block_id])


def test_check_notices_a_block_that_is_free_twice() -> None:
    pool = BlockPool(2)
    pool._idle.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check([])


def test_check_notices_a_cached_block_that_is_not_cacheable() -> None:
    pool = BlockPool(2)
    cached(pool, 1)
    pool._is_cacheable[0] = False
    with pytest.raises(AssertionError, match="cacheable"):
        pool.check([])


def test_the_cost_of_a_block_does_not_grow_with_the_pool() -> None:
    small, large = _seconds_per_use(1_000), _seconds_per_use(100_000)
    # 100 times the blocks; what is seen beyond 1x are misses of the processor's caches.
    assert large < 8 * small, f"{small * 1e9:.0f} ns with 1,000 blocks, {large * 1e9:.0f} ns with 100,000"


def _seconds_per_use(num_blocks: int, num_uses: int = 20_000) -> float:
    """One use: free a random block, evict one, publish it, share it, drop that reference. The pool stays full."""
    rng = random.Random(1)
    pool = BlockPool(num_blocks)
    held = [pool.allocate() for _ in range(num_blocks)]
    for block_id in held:
        pool.mark_cacheable(block_id)
    pool.release(held[num_blocks // 2 :])
    del held[num_blocks // 2 :]
    best = float("inf")
    for _ in range(3):
        slots = [rng.randrange(len(held)) for _ in range(num_uses)]
        start = time.perf_counter()
        for slot in slots:
            pool.release([held[slot]])
            held[slot] = pool.allocate()
            pool.mark_cacheable(held[slot])
            pool.share([held[slot]])
            pool.release([held[slot]])
        best = min(best, time.perf_counter() - start)
    pool.check(held)
    assert pool.num_evictions == 3 * num_uses
    return best / num_uses
