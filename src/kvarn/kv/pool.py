"""Block ids with reference counts; every step is O(1). The order of eviction is decided here and nowhere else.

Knows which blocks are cacheable, that is worth keeping when free; never what is in them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvarn.observe.histogram import LONG_SECONDS, Histogram, HistogramSnapshot

FREE, CACHED, HELD, SHARED = range(4)  # what a block is used for, see BlockPool.states()
KEPT_SHARE = 4  # at most one block in so many is kept


@dataclass(frozen=True, slots=True)
class KVStats:
    """used + cached + free = num_blocks; shared ones are among the used."""

    num_blocks: int
    used: int
    cached: int  # findable, held by no sequence: evicted when room is needed
    shared: int
    free: int
    unused_slots: int  # positions in last blocks that their sequence does not hold yet
    lookups: int
    hit_tokens: int  # taken over by fork from what lookup found
    evictions: int


class BlockPool:
    """num_blocks ids; each is referenced by count() tables, or free and then in exactly one of four lists.

    allocate() takes from the first of these that has a block:
        idle      backed by memory, content of no use; the last freed first, because it is the warmest in the CPU caches
        returned  not backed by memory: never used, or returned to the system after reclaim()
        cached    cacheable; those that were passed over first, then the least recently freed (LRU)
        kept      cacheable and to be kept, see keep(); the least recently freed first
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_blocks = num_blocks
        self.num_shared = 0  # blocks with two references or more
        self.num_evictions = 0
        self._counts = [0] * num_blocks
        self._is_cacheable = bytearray(num_blocks)
        self._was_shared = bytearray(num_blocks)  # since it was filled
        self._idle: list[int] = []
        self._returned = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._free_kept: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()  # free or not, those that were kept longest ago first
        self._clock = clock
        self._filled_at: dict[int, float] = {}  # of cacheable blocks
        self._used_at: dict[int, float] = {}
        self._lifetimes, self._idle_times, self._reuse_gaps = (Histogram(LONG_SECONDS) for _ in range(3))

    @property
    def num_free(self) -> int:
        """Blocks that allocate() could give, cached ones included."""
        return len(self._idle) + len(self._returned) + self.num_cached

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._free_kept)

    @property
    def num_kept(self) -> int:
        """Blocks that are kept, free or not."""
        return len(self._kept)

    @property
    def cached_ids(self) -> list[int]:
        """Free cacheable blocks, the next to be evicted first."""
        return [*self._cached, *self._free_kept]

    @property
    def cacheable_ids(self) -> list[int]:
        """All cacheable blocks, free or not."""
        return [block_id for block_id, is_cacheable in enumerate(self._is_cacheable) if is_cacheable]

    def count(self, block_id: int) -> int:
        return self._counts[block_id]

    def allocate(self) -> int:
        """Take a free block; the caller has seen num_free > 0. What it held is lost."""
        block_id = self._take()
        assert self._counts[block_id] == 0
        self._counts[block_id] = 1
        self._was_shared[block_id] = False
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each; a free one must be cached."""
        for block_id in block_ids:
            if self._counts[block_id] == 0:
                del self._list_of(block_id)[block_id]
                self._reuse_gaps.observe(self._clock() - self._used_at[block_id])
            self._counts[block_id] += 1
            self._was_shared[block_id] = True
            self.num_shared += self._counts[block_id] == 2

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each, given in order of position.

        The last is freed first: a block is of use only behind its ancestors, so it must be evicted before them.
        """
        for block_id in reversed(block_ids):
            assert self._counts[block_id] > 0, f"block {block_id} is released while free"
            self._counts[block_id] -= 1
            self.num_shared -= self._counts[block_id] == 1
            if self._counts[block_id] == 0:
                self._free(block_id)

    def pass_over(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each: the sequence has left them behind, and who follows will, too.

        Those that nobody else ever held are evicted before all others, so that a long prompt takes its own.
        """
        self.release(block_ids)
        for block_id in block_ids:
            if block_id in self._cached and not self._was_shared[block_id]:
                self._cached.move_to_end(block_id, last=False)

    def mark_cacheable(self, block_id: int) -> None:
        """Keep the content of this referenced block when it becomes free, until it is evicted."""
        assert self._counts[block_id] > 0
        self._is_cacheable[block_id] = True
        self._filled_at[block_id] = self._used_at[block_id] = self._clock()

    def keep(self, block_ids: Sequence[int]) -> None:
        """Evict these cacheable blocks, given in order of position, after all others when they are free.

        At most a share of the pool is kept: of too long a prefix its front, and what was kept longest ago gives way.
        """
        most = self.num_blocks // KEPT_SHARE
        for block_id in reversed(block_ids[:most]):  # so that the front of a prefix is kept longest
            assert self._is_cacheable[block_id], f"block {block_id} holds nothing to be kept"
            if block_id in self._cached:
                del self._cached[block_id]
                self._free_kept[block_id] = None
            self._kept[block_id] = None
            self._kept.move_to_end(block_id)
        while len(self._kept) > most:
            block_id, _ = self._kept.popitem(last=False)
            if block_id in self._free_kept:
                del self._free_kept[block_id]
                self._cached[block_id] = None

    def unmark_cacheable(self, block_id: int) -> None:
        """The content is of no use any more."""
        free = self._list_of(block_id)
        self._discard_content(block_id)
        if block_id in free:
            del free[block_id]
            self._idle.append(block_id)

    def reclaim(self) -> list[int]:
        """Return the idle blocks, ascending; they count as having no memory until they are allocated again."""
        reclaimed = sorted(self._idle)
        self._idle.clear()
        self._returned.extend(reversed(reclaimed))
        return reclaimed

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Lifetimes, idle times and reuse gaps of cached blocks in seconds, by the name of the metric."""
        return {
            "kv_block_lifetime_seconds": self._lifetimes.snapshot(),
            "kv_block_idle_before_evict_seconds": self._idle_times.snapshot(),
            "kv_block_reuse_gap_seconds": self._reuse_gaps.snapshot(),
        }

    def states(self) -> npt.NDArray[np.uint8]:
        """What each block is used for now: FREE, CACHED, HELD by one sequence or SHARED by several."""
        counts = np.array(self._counts, np.int64)
        states = np.select([counts == 0, counts == 1], [FREE, HELD], SHARED).astype(np.uint8)
        states[self.cached_ids] = CACHED
        return states

    def check(self, references: Iterable[int]) -> None:
        """Assert that counts equal the given references and that free + referenced = total."""
        counts = [0] * self.num_blocks
        for block_id in references:
            counts[block_id] += 1
        assert counts == self._counts, "reference counts differ from the tables"
        assert self.num_shared == sum(count > 1 for count in counts), "the number of shared blocks is wrong"
        free = {*self._idle, *self._returned, *self.cached_ids}
        assert len(free) == self.num_free, "a block is free twice"
        assert free == {b for b, count in enumerate(counts) if count == 0}, "free blocks and counts disagree"
        cacheable = {b for b in free if self._is_cacheable[b]}
        assert cacheable == set(self.cached_ids), "cached and cacheable free blocks disagree"
        assert set(self._free_kept) == cacheable & set(self._kept), "a block that is kept is evicted too early"
        assert all(self._is_cacheable[block_id] for block_id in self._kept), "a block is kept for nothing"
        assert len(self._kept) <= self.num_blocks // KEPT_SHARE, "too many blocks are kept"

    def _take(self) -> int:
        if self._idle:
            return self._idle.pop()
        if self._returned:
            return self._returned.pop()
        block_id, _ = (self._cached or self._free_kept).popitem(last=False)
        self._discard_content(block_id)
        self.num_evictions += 1
        return block_id

    def _discard_content(self, block_id: int) -> None:
        """Record that the content of a block is lost."""
        if self._is_cacheable[block_id]:
            now = self._clock()
            self._lifetimes.observe(now - self._filled_at.pop(block_id))
            self._idle_times.observe(now - self._used_at.pop(block_id))
        self._is_cacheable[block_id] = False
        self._kept.pop(block_id, None)

    def _list_of(self, block_id: int) -> OrderedDict[int, None]:
        """Where a cacheable block is when it is free."""
        return self._free_kept if block_id in self._kept else self._cached

    def _free(self, block_id: int) -> None:
        if self._is_cacheable[block_id]:
            self._list_of(block_id)[block_id] = None
            self._used_at[block_id] = self._clock()
        else:
            self._idle.append(block_id)
