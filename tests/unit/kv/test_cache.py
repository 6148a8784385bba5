"""Block bookkeeping: extend, trim, release and check()."""

from __future__ import annotations

import random

import pytest

from kvarn.kv.cache import KVCache


def test_extend_takes_blocks_as_positions_need_them() -> None:
    cache = KVCache(num_blocks=4, block_size=4)
    assert cache.extend("a", 4) == []
    assert len(cache.block_ids("a")) == 1
    assert cache.extend("a", 1) == []
    assert len(cache.block_ids("a")) == 2
    cache.check()


def test_extend_without_room_says_so_and_changes_nothing() -> None:
    cache = KVCache(num_blocks=3, block_size=4)
    cache.extend("a", 8)
    assert cache.extend("b", 5) is None
    assert cache.num_tokens("b") == 0
    assert cache.num_free == 1
    cache.check()


def test_trim_gives_back_whole_blocks_only() -> None:
    cache = KVCache(num_blocks=4, block_size=4)
    cache.extend("a", 13)
    kept = cache.block_ids("a")[:2].tolist()
    cache.trim("a", 5)
    assert cache.block_ids("a").tolist() == kept
    assert cache.num_free == 2
    cache.check()


def test_release_of_an_unknown_sequence_is_nothing() -> None:
    cache = KVCache(num_blocks=1, block_size=4)
    cache.release("nobody")
    assert cache.num_free == 1
    cache.check()


def test_check_notices_a_lost_block() -> None:
    cache = KVCache(num_blocks=2, block_size=4)
    cache.extend("a", 4)
    cache._full.tables.clear()
    with pytest.raises(AssertionError, match="counts"):
        cache.check()


def test_check_notices_a_block_in_two_tables() -> None:
    cache = KVCache(num_blocks=2, block_size=4)
    cache.extend("a", 4)
    cache.extend("b", 4)
    cache.block_ids("b")[0] = cache.block_ids("a")[0]
    with pytest.raises(AssertionError, match="counts"):
        cache.check()


@pytest.mark.parametrize("num_blocks", [1, 3, 50])
def test_random_use_never_loses_a_block_or_gives_one_to_two(num_blocks: int) -> None:
    cache, rng = KVCache(num_blocks, 4), random.Random(num_blocks)
    for _ in range(2_000):
        name = f"s{rng.randrange(6)}"
        match rng.randrange(3):
            case 0:
                before = cache.num_tokens(name)
                grown = cache.extend(name, rng.randrange(1, 12))
                assert (grown is None) == (cache.num_tokens(name) == before)
            case 1 if cache.num_tokens(name):
                cache.trim(name, rng.randrange(cache.num_tokens(name) + 1))
            case _:
                cache.release(name)
        cache.check()
    for index in range(6):
        cache.release(f"s{index}")
    assert cache.num_free == num_blocks
