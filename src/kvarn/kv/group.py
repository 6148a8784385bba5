"""The blocks of layers that keep the same positions of a sequence: all of them, or those in a window.

Every group has ids, tables and an index of its own; a model of one kind of layers has one group. Ids only, never a
tensor; knows digests of prefixes, never tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvarn.backends.batch import BlockCopy
from kvarn.kv.pool import BlockPool
from kvarn.kv.prefix import PrefixIndex
from kvarn.kv.table import FREED, BlockTable, blocks_for

Extendable = tuple[list[BlockTable], list[BlockTable]]  # all of some sequences, and those whose last block is full


@dataclass(frozen=True, slots=True)
class WindowShape:
    """What layers with a window keep: a query at position p reads no key before p - num_tokens."""

    num_tokens: int
    num_blocks: int
    step_tokens: int  # positions that may be extended before advance() frees those in front of the window


class BlockGroup:
    """The tables of all sequences over one pool; window: None where a query may read all keys before it.

    on_lost is told the digest of every published block whose content is given up.
    """

    def __init__(
        self,
        number: int,
        num_blocks: int,
        block_size: int,
        window: WindowShape | None,
        on_lost: Callable[[bytes], None],
    ) -> None:
        self.number = number  # among the groups of a cache
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self.tables: dict[str, BlockTable] = {}
        self._block_size = block_size
        self._window = window
        self._on_lost = on_lost

    def needed_from(self, num_tokens: int) -> int:
        """The first block that a query behind num_tokens positions reads, or any later one."""
        return 0 if self._window is None else max(0, num_tokens - self._window.num_tokens) // self._block_size

    def most_blocks(self, num_tokens: int, *, is_decoding: bool) -> int:
        """Blocks that a sequence of num_tokens positions holds at one time."""
        if self._window is not None:
            step_tokens = 1 if is_decoding else self._window.step_tokens
            num_tokens = min(num_tokens, self._window.num_tokens + step_tokens + 2 * self._block_size)
        return blocks_for(num_tokens, self._block_size)

    def num_held(self, sequence: str) -> int:
        table = self.tables.get(sequence)
        return 0 if table is None else table.num_blocks - table.num_freed

    def longest(self, digests: Sequence[bytes]) -> int:
        """How many blocks of a prefix a sequence can start behind: all that its next query reads are findable."""
        num_found = longest = 0
        for count, digest in enumerate(digests, 1):
            num_found = 0 if self.index.find(digest) is None else num_found + 1
            if num_found >= count - self.needed_from(count * self._block_size):
                longest = count
        return longest

    def can_start(self, source: str, num_tokens: int) -> bool:
        """Whether another sequence holds what one that starts behind its first num_tokens positions would read."""
        return self.tables[source].num_freed <= self.needed_from(num_tokens)

    def share(self, sequence: str, origin: BlockTable, num_tokens: int) -> None:
        """Start a sequence on the first positions of a table."""
        table = origin.prefix(num_tokens)
        assert table.num_freed <= self.needed_from(num_tokens), "what the sequence would read has been freed"
        origin.owns_last = False
        self.pool.share(table.held_ids)
        self.tables[sequence] = table

    def table_of(self, digests: Sequence[bytes], tenant: str) -> BlockTable:
        """A table over the blocks of a hit, which must still be findable where they are needed."""
        table, first = BlockTable(self._block_size, tenant), self.needed_from(len(digests) * self._block_size)
        for number, digest in enumerate(digests):
            block_id = FREED if number < first else self.index.find(digest)
            assert block_id is not None, "the hit is stale: look up and fork without changing the cache in between"
            table.append(block_id)
        table.num_tokens, table.num_published = len(digests) * self._block_size, len(digests)
        table.num_freed = first
        return table

    def has_room(self, sequence: str, num_tokens: int) -> bool:
        """Whether extend() would find the blocks for num_tokens more positions."""
        table = self.table(sequence)
        missing = table.blocks_missing(num_tokens)
        return missing + self._needs_copy(table, num_tokens, missing) <= self.pool.num_free

    def extend(self, sequence: str, num_tokens: int) -> list[BlockCopy]:
        """Add num_tokens positions, for which there is room."""
        table = self.tables[sequence] = self.table(sequence)
        missing = table.blocks_missing(num_tokens)
        read_only = self.read_only_block(table) if num_tokens else None
        copies = []
        if read_only is not None and self._needs_copy(table, num_tokens, missing):
            copies.append(self._copy_on_write(table, read_only))
        elif read_only is not None:  # only this sequence holds it, and there is no room for a copy beside it
            self.unpublish(read_only)
        for _ in range(missing):
            table.append(self.allocate())
        table.num_tokens += num_tokens
        table.owns_last = table.owns_last or num_tokens > 0
        return copies

    def extend_in_block(self, sequence: str) -> bool:
        """Add one position in a block that may be written; False: there is none."""
        table = self.tables[sequence]
        if not table.has_own_room:
            return False
        table.num_tokens += 1
        return True

    def extendable(self, sequences: Sequence[str], num_tokens: Sequence[int]) -> Extendable | None:
        """What extend_each() needs to add a position to sequences that hold num_tokens; None: it cannot."""
        tables = [self.tables[sequence] for sequence in sequences]
        full, block_size = [], self._block_size
        for table, held in zip(tables, num_tokens, strict=True):
            if table.num_tokens != held or not (table.owns_last or held % block_size == 0):
                return None
            if held % block_size == 0:
                full.append(table)
        return (tables, full) if len(full) <= self.pool.num_free else None

    def extend_each(self, found: Extendable) -> list[int]:
        """Add one position to each; the versions of their tables."""
        tables, full = found
        for table in full:
            table.append(self.allocate())
            table.owns_last = True
        for table in tables:
            table.num_tokens += 1
        return [table.version for table in tables]

    def publish_block(self, sequence: str, number: int, digest: bytes) -> None:
        """Make a full block of a sequence findable, or take the equal one that is in place of it."""
        table = self.tables[sequence]
        if number >= table.num_freed:
            own, first = int(table.block_ids[number]), self.index.find(digest)
            if first is None:
                self.index.add(digest, own)
                self.pool.mark_cacheable(own)
            elif first != own:  # two sequences computed the same at the same time: hold it once
                assert self.index.digest_of(own) is None
                self.pool.share([first])
                self.pool.release([table.replace(number, first)])
        table.num_published = number + 1

    def published(self, sequence: str) -> list[bytes]:
        """Digests of a sequence's published blocks, in a group that frees none on the way."""
        table = self.tables[sequence]
        digests = map(self.index.digest_of, table.block_ids[: table.num_published].tolist())
        return [digest for digest in digests if digest is not None]

    def advance(self, sequence: str, num_computed: int) -> None:
        """Free what no query behind num_computed positions reads. A fork may begin one position earlier."""
        if self._window is None:
            return
        table, first = self.tables[sequence], self.needed_from(num_computed - 1)
        if first > table.num_freed:
            self.pool.pass_over(table.free_front(first))

    def trim(self, sequence: str, num_tokens: int) -> None:
        """Roll back to the first num_tokens positions."""
        assert self.can_start(sequence, num_tokens) or num_tokens == 0, "what would be read next has been freed"
        self.pool.release(self.tables[sequence].cut(num_tokens))

    def keep(self, sequence: str, num_tokens: int) -> None:
        """Evict the published blocks of a sequence's first positions after those of others."""
        table = self.tables[sequence]
        count = min(table.num_published, num_tokens // self._block_size)
        self.pool.keep(table.block_ids[table.num_freed : count].tolist())

    def release(self, sequence: str, *, unpublish: bool) -> None:
        """Free what a sequence holds; unpublish also blocks that no other holds."""
        table = self.tables.pop(sequence, None)
        if table is None:
            return
        block_ids = table.cut(0)
        self.pool.release(block_ids)
        if unpublish:
            for block_id in block_ids:
                if self.pool.count(block_id) == 0:
                    self.unpublish(block_id)

    def forget(self, digest: bytes) -> None:
        """The block of a digest is of no use any more."""
        block_id = self.index.find(digest)
        if block_id is not None:
            self.unpublish(block_id)

    def unpublish(self, block_id: int) -> None:
        self._lose(block_id)
        self.pool.unmark_cacheable(block_id)

    def table(self, sequence: str) -> BlockTable:
        """That of a sequence; an empty one where it holds nothing yet."""
        return self.tables.get(sequence) or BlockTable(self._block_size)

    def read_only_block(self, table: BlockTable) -> int | None:
        """The last block, when the next position lies in it but must not be written there."""
        block_id = table.partial_block
        if block_id is None:
            return None
        is_read_only = self.pool.count(block_id) > 1 or self.index.digest_of(block_id) is not None
        return block_id if is_read_only else None

    def allocate(self) -> int:
        block_id = self.pool.allocate()
        self._lose(block_id)  # if it was evicted
        return block_id

    def check(self) -> None:
        """Assert every invariant."""
        for table in self.tables.values():
            assert table.num_blocks == blocks_for(table.num_tokens, self._block_size)
            assert table.num_published <= table.num_tokens // self._block_size
            assert table.num_freed <= self.needed_from(table.num_tokens), "a block that will be read was freed"
            assert (table.block_ids[: table.num_freed] == FREED).all(), "a freed block is in a table"
            if table.has_own_room:
                assert self.read_only_block(table) is None, "a block that others read may be written"
            published = table.block_ids[table.num_freed : table.num_published].tolist()
            assert all(self.index.digest_of(b) is not None for b in published), "a published block is not findable"
        self.pool.check(self._references())
        self.index.check(self.pool.cacheable_ids)

    def _references(self) -> Iterator[int]:
        for table in self.tables.values():
            yield from table.held_ids

    def _needs_copy(self, table: BlockTable, num_tokens: int, missing: int) -> bool:
        read_only = self.read_only_block(table) if num_tokens else None
        if read_only is None:
            return False
        return missing != self.pool.num_free or self.pool.count(read_only) > 1

    def _copy_on_write(self, table: BlockTable, block_id: int) -> BlockCopy:
        target = self.allocate()
        table.replace(table.num_blocks - 1, target)
        self.pool.release([block_id])
        return BlockCopy(block_id, target, table.num_tokens % self._block_size, self.number)

    def _lose(self, block_id: int) -> None:
        digest = self.index.digest_of(block_id)
        if digest is not None:
            self._on_lost(digest)
            self.index.remove(block_id)
