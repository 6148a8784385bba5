"""Blocks that threads read ahead of who takes them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from kvarn.prefix_store.pack import UInt8
from kvarn.prefix_store.reader import BlockReader, ReadJob
from tests.unit.prefix_store.stores import block, blocks, digest, opened

COUNT = 300


def next_block(job: ReadJob) -> UInt8:
    give_up_at = time.monotonic() + 30
    while (content := job.take()) is None:
        assert time.monotonic() < give_up_at
        time.sleep(0.0001)
    return content


def test_memory_of_blocks_that_were_taken_holds_later_ones_and_is_given_up_at_the_end(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.append(blocks(range(COUNT)))
    reader = BlockReader(store)
    reader._max_ahead = 4  # as with large blocks
    places = set()
    for _ in range(2):
        job = reader.begin([digest(number) for number in range(COUNT)])
        for number in range(COUNT):
            content = next_block(job)
            assert np.array_equal(content, block(number).content)
            places.add(content.ctypes.data)
            reader.taken([content])
        assert job.is_over
    assert not reader._unused
    assert len(places) < COUNT / 3  # each time a few: what is ahead, and what the threads read
    reader.close()


def test_a_block_that_is_not_taken_keeps_its_memory(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.append(blocks(range(COUNT)))
    reader = BlockReader(store)
    held, other = (reader.begin([digest(number) for number in numbers]) for numbers in (range(10), range(10, COUNT)))
    for number in range(10, COUNT):
        content = next_block(other)
        assert np.array_equal(content, block(number).content)
        reader.taken([content])
    assert [next_block(held).tobytes() for _ in range(10)] == [block(number).content.tobytes() for number in range(10)]
    assert held.is_over
    reader.close()
