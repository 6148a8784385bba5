"""The blocks of one sequence, in order of position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BlockTable:
    """Position p lies in block_ids[p // block_size]; num_tokens positions are held."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_tokens = 0
        self._ids = np.empty(8, np.int32)
        self._num_blocks = 0

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self._num_blocks]

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def blocks_missing(self, num_tokens: int) -> int:
        """How many blocks an extension by num_tokens would add."""
        return max(0, blocks_for(self.num_tokens + num_tokens, self.block_size) - self._num_blocks)

    def append(self, block_id: int) -> None:
        if self._num_blocks == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self._num_blocks] = block_id
        self._num_blocks += 1

    def cut(self, num_tokens: int) -> list[int]:
        """Keep the first num_tokens positions and return the blocks no longer needed."""
        keep = blocks_for(num_tokens, self.block_size)
        dropped = [int(block_id) for block_id in self._ids[keep : self._num_blocks]]
        self._num_blocks, self.num_tokens = keep, num_tokens
        return dropped


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that num_tokens positions occupy."""
    return -(-num_tokens // block_size)
