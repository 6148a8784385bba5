"""Block ids with reference counts and a free list: O(1) allocate and release. Knows nothing of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """num_blocks ids; each is free (count 0) or referenced by count tables."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take the block that has been free the longest; the caller has seen num_free > 0."""
        block_id = self._free.popleft()
        assert self._counts[block_id] == 0
        self._counts[block_id] = 1
        return block_id

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each."""
        for block_id in block_ids:
            assert self._counts[block_id] > 0, f"block {block_id} is released while free"
            self._counts[block_id] -= 1
            if self._counts[block_id] == 0:
                self._free.append(block_id)

    def check(self, references: Iterable[int]) -> None:
        """Assert that counts equal the given references and that free + referenced = total."""
        counts = [0] * self.num_blocks
        for block_id in references:
            counts[block_id] += 1
        assert counts == self._counts, "reference counts differ from the tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert free == {b for b, count in enumerate(counts) if count == 0}, "free list and counts disagree"
