"""The blocks of one sequence, in order of position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FREED = -1  # in place of a block id


class BlockTable:
    """Position p lies in block_ids[p // block_size]; num_tokens positions are held.

    freed (-1) | published | full, not yet published | partial
    0          num_freed   num_published             num_blocks - 1
    """

    def __init__(self, block_size: int, tenant: str | None = None) -> None:
        self.block_size = block_size
        self.tenant = tenant  # known from the first publication on
        self.num_tokens = 0
        self.num_published = 0  # leading blocks that the prefix index knows
        self.num_freed = 0  # leading blocks that no later query reads; 0 where all is kept
        self.owns_last = False  # the last block is nobody else's, and not published: it may be written
        self.version = 0  # differs whenever block_ids does
        self._ids = np.empty(8, np.int32)
        self._num_blocks = 0

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self._num_blocks]

    @property
    def held_ids(self) -> list[int]:
        """Without those that were freed."""
        held: list[int] = self._ids[self.num_freed : self._num_blocks].tolist()
        return held

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def partial_block(self) -> int | None:
        """The last block, when the next position still lies in it."""
        return int(self._ids[self._num_blocks - 1]) if self.num_tokens % self.block_size else None

    @property
    def num_unused_slots(self) -> int:
        return self._num_blocks * self.block_size - self.num_tokens

    @property
    def has_own_room(self) -> bool:
        """The next position lies in a block that may be written."""
        return self.owns_last and self.num_tokens % self.block_size != 0

    def blocks_missing(self, num_tokens: int) -> int:
        """How many blocks an extension by num_tokens would add."""
        return max(0, blocks_for(self.num_tokens + num_tokens, self.block_size) - self._num_blocks)

    def append(self, block_id: int) -> None:
        if self._num_blocks == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self._num_blocks] = block_id
        self._num_blocks += 1
        self.version += 1

    def replace(self, index: int, block_id: int) -> int:
        """Put another block of the same content in its place and return the old one."""
        old = int(self._ids[index])
        self._ids[index] = block_id
        self.version += 1
        return old

    def prefix(self, num_tokens: int) -> BlockTable:
        """A table over the same blocks that holds the first num_tokens positions."""
        assert 0 <= num_tokens <= self.num_tokens
        table = BlockTable(self.block_size, self.tenant)
        table.num_tokens = num_tokens
        table._num_blocks = blocks_for(num_tokens, self.block_size)
        table._ids = self._ids[: max(8, table._num_blocks)].copy()
        table.num_published = min(self.num_published, num_tokens // self.block_size)
        table.num_freed = min(self.num_freed, table._num_blocks)
        return table

    def free_front(self, num_blocks: int) -> list[int]:
        """Give up the first num_blocks blocks and return those that were held."""
        dropped: list[int] = self._ids[self.num_freed : num_blocks].tolist()
        self._ids[self.num_freed : num_blocks] = FREED
        self.num_freed = num_blocks
        self.version += 1
        return dropped

    def cut(self, num_tokens: int) -> list[int]:
        """Keep the first num_tokens positions and return the blocks no longer needed."""
        keep = blocks_for(num_tokens, self.block_size)
        dropped: list[int] = self._ids[max(keep, self.num_freed) : self._num_blocks].tolist()
        self.num_freed = min(self.num_freed, keep)
        self._num_blocks, self.num_tokens, self.owns_last = keep, num_tokens, False
        self.version += 1
        self.num_published = min(self.num_published, num_tokens // self.block_size)
        return dropped


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that num_tokens positions occupy."""
    return -(-num_tokens // block_size)
