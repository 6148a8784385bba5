"""Bookkeeping of the paged KV cache: ids only, never a tensor.

extend, trim and release change a sequence; check() asserts that nothing leaked. It never decides whom to evict:
extend returns None when there is no room, and the scheduler chooses what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import BlockCopy
from kvarn.kv.pool import BlockPool
from kvarn.kv.table import BlockTable, blocks_for


class KVCache:
    """Block tables of all sequences over one pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def max_tokens(self) -> int:
        """The longest sequence the whole cache could hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def extend(self, sequence: str, num_tokens: int) -> list[BlockCopy] | None:
        """Make room for num_tokens more positions; None and no change when the pool cannot."""
        table = self._tables.get(sequence) or BlockTable(self.block_size)
        missing = table.blocks_missing(num_tokens)
        if missing > self._pool.num_free:
            return None
        for _ in range(missing):
            table.append(self._pool.allocate())
        table.num_tokens += num_tokens
        self._tables[sequence] = table
        return []

    def trim(self, sequence: str, num_tokens: int) -> None:
        """Roll back to the first num_tokens positions."""
        table = self._tables[sequence]
        assert 0 <= num_tokens <= table.num_tokens
        self._pool.release(table.cut(num_tokens))

    def release(self, sequence: str) -> None:
        """Forget a sequence; unknown ones hold nothing."""
        table = self._tables.pop(sequence, None)
        if table is not None:
            self._pool.release(table.cut(0))

    def block_ids(self, sequence: str) -> npt.NDArray[np.int32]:
        return self._tables[sequence].block_ids

    def num_tokens(self, sequence: str) -> int:
        table = self._tables.get(sequence)
        return 0 if table is None else table.num_tokens

    def check(self) -> None:
        """Assert every invariant; run after each step in tests."""
        for table in self._tables.values():
            assert table.num_blocks == blocks_for(table.num_tokens, self.block_size)
        self._pool.check(self._references())

    def _references(self) -> Iterator[int]:
        for table in self._tables.values():
            yield from table.block_ids.tolist()
