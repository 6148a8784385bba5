"""Bookkeeping of the paged KV cache: ids only, never a tensor.

Two rules make sharing safe: positions are written only after extend() granted them, and extend() never grants a
position in a block that is shared or published. It never decides which request to preempt: extend returns None
when there is no room, and the scheduler decides what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import BlockCopy
from kvarn.kv.pool import BlockPool, KVStats
from kvarn.kv.prefix import BlockHasher, PrefixHit, PrefixIndex
from kvarn.kv.states import StateCache
from kvarn.kv.table import BlockTable, blocks_for
from kvarn.observe.histogram import HistogramSnapshot


class KVCache:
    """Block tables of all sequences over one pool."""

    def __init__(self, num_blocks: int, block_size: int, *, hash_key: bytes | None = None, num_states: int = 0) -> None:
        """num_states: slots for the states of recurrent layers; 0: the model has none."""
        self.block_size = block_size
        self.states = StateCache(num_states, block_size) if num_states else None
        self._pool = BlockPool(num_blocks)
        self._hasher = BlockHasher(block_size, hash_key)
        self._index = PrefixIndex()
        self._tables: dict[str, BlockTable] = {}
        self._num_lookups = self._num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks no sequence holds, including cached ones, which can be evicted."""
        return self._pool.num_free

    @property
    def max_tokens(self) -> int:
        """The longest sequence the whole cache could hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def lookup(self, token_ids: Sequence[int], tenant: str = "") -> PrefixHit:
        """Find the longest published prefix in full blocks, with recurrent layers one that ends in a snapshot of their
        states; the last token is always left to compute."""
        self._num_lookups += 1
        block_ids, digests = [], []
        for digest in self._hasher.chain(self._hasher.root(tenant), token_ids, 0, len(token_ids) - 1):
            block_id = self._index.find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
            digests.append(digest)
        count = len(digests) if self.states is None else self.states.longest(digests)
        found = tuple(block_ids[:count]), tenant, tuple(digests[:count])
        return PrefixHit(count * self.block_size, *found, num_matched=len(digests) * self.block_size)

    def fork(self, sequence: str, source: str | PrefixHit, num_tokens: int | None = None) -> None:
        """Start a sequence on the first num_tokens positions of another, or of a hit, sharing their blocks."""
        assert self.num_tokens(sequence) == 0, f"sequence {sequence} already holds blocks"
        if self.states is not None:
            assert isinstance(source, PrefixHit), "a recurrent state is taken over from a snapshot only"
            self.states.begin(sequence, source.digests, source.num_matched)
        origin = self._tables[source] if isinstance(source, str) else self._table_of(source)
        table = origin.prefix(origin.num_tokens if num_tokens is None else num_tokens)
        origin.owns_last = False
        self._pool.share(table.block_ids.tolist())
        self._tables[sequence] = table
        if isinstance(source, PrefixHit):
            self._num_hit_tokens += table.num_tokens

    def extend(self, sequence: str, num_tokens: int) -> list[BlockCopy] | None:
        """Make room for num_tokens more positions; None and no change when the pool cannot.

        The copies must be made in the order they were returned and before the step writes anything. A sequence whose
        copies were not made holds nothing of use in its last block: release it, or trim it to a block's edge.
        """
        table = self._tables.get(sequence) or BlockTable(self.block_size)
        missing = table.blocks_missing(num_tokens)
        read_only = self._read_only_block(table) if num_tokens else None
        if read_only is not None and missing == self.num_free and self._pool.count(read_only) == 1:
            self._unpublish(read_only)  # only this sequence holds it, and there is no room for a copy beside it
            read_only = None
        if missing + (read_only is not None) > self.num_free:
            return None
        copies = [] if read_only is None else [self._copy_on_write(table, read_only)]
        for _ in range(missing):
            table.append(self._allocate())
        if self.states is not None:
            self.states.extend(sequence, table.num_tokens, table.num_tokens + num_tokens)
        table.num_tokens += num_tokens
        table.owns_last = table.owns_last or num_tokens > 0
        self._tables[sequence] = table
        return copies

    def extend_to(self, sequence: str, num_tokens: int) -> Sequence[BlockCopy] | None:
        """Make room up to num_tokens positions, as extend() does; next to nothing for one more in a block it owns."""
        table = self._tables.get(sequence)
        if table is None:
            return self.extend(sequence, num_tokens)
        if table.num_tokens + 1 == num_tokens and table.has_own_room and self.states is None:
            table.num_tokens = num_tokens
            return ()
        return self.extend(sequence, num_tokens - table.num_tokens)

    def extend_each(self, sequences: Sequence[str], num_tokens: Sequence[int]) -> list[int] | None:
        """One more position for each of several sequences that hold num_tokens; the versions of their tables.

        None and no change where one of them does not, would need a copy or has states, or the pool has too few blocks.
        """
        if self.states is not None:
            return None
        tables = [self._tables[sequence] for sequence in sequences]
        full = []
        for table, held in zip(tables, num_tokens, strict=True):
            if table.num_tokens != held or not (table.owns_last or held % self.block_size == 0):
                return None
            if held % self.block_size == 0:
                full.append(table)
        if len(full) > self.num_free:
            return None
        for table in full:
            table.append(self._allocate())
            table.owns_last = True
        for table in tables:
            table.num_tokens += 1
        return [table.version for table in tables]

    def publish(
        self,
        sequence: str,
        token_ids: Sequence[int],
        tenant: str = "",
        num_computed: int | None = None,
        *,
        is_decoding: bool = False,
    ) -> None:
        """Make the full blocks of these tokens findable.

        token_ids are the sequence's tokens from position 0 on; the first num_computed of them, or those it holds
        positions for, must have been computed for good; further ones are left out. Costs next to nothing when no block
        has become full. is_decoding: a snapshot of states takes the place of the one before.
        """
        table = self._tables[sequence]
        start = table.num_published * self.block_size
        stop = min(len(token_ids), table.num_tokens)
        if num_computed is not None and num_computed < stop:
            stop = num_computed
        if stop - start < self.block_size:
            return
        assert table.tenant in (None, tenant), f"sequence {sequence} belongs to another tenant"
        table.tenant = tenant
        for digest in self._hasher.chain(self._chain_end(table, tenant), token_ids, start, stop):
            self._publish_block(table, digest)
            if self.states is not None:
                end = table.num_published * self.block_size
                self.states.publish(sequence, end, digest, is_decoding=is_decoding)

    def trim(self, sequence: str, num_tokens: int) -> None:
        """Roll back to the first num_tokens positions; what was published stays findable."""
        table = self._tables[sequence]
        assert 0 <= num_tokens <= table.num_tokens
        if self.states is not None:
            self.states.trim(sequence, num_tokens)
        self._pool.release(table.cut(num_tokens))

    def release(self, sequence: str, *, unpublish: bool = False) -> None:
        """Free a sequence; unpublish also its blocks that no other sequence holds. Unknown sequences hold nothing."""
        if self.states is not None:
            self.states.release(sequence)
        table = self._tables.pop(sequence, None)
        if table is None:
            return
        block_ids = table.cut(0)
        self._pool.release(block_ids)
        if unpublish:
            for block_id in block_ids:
                if self._pool.count(block_id) == 0:
                    self._unpublish(block_id)

    def reclaim(self, *, drop_cached: bool = False) -> list[int]:
        """Return free blocks whose memory may go back to the system: each once, until it is used again.

        Call it between steps, when no copy is outstanding. drop_cached includes the cached blocks.
        """
        if drop_cached:
            for block_id in self._pool.cached_ids:
                self._unpublish(block_id)
        return self._pool.reclaim()

    def block_ids(self, sequence: str) -> npt.NDArray[np.int32]:
        return self._tables[sequence].block_ids

    def num_tokens(self, sequence: str) -> int:
        table = self._tables.get(sequence)
        return 0 if table is None else table.num_tokens

    def stats(self) -> KVStats:
        pool = self._pool
        return KVStats(
            num_blocks=pool.num_blocks,
            used=pool.num_blocks - pool.num_free,
            cached=pool.num_cached,
            shared=pool.num_shared,
            free=pool.num_free - pool.num_cached,
            unused_slots=sum(table.num_unused_slots for table in self._tables.values()),
            lookups=self._num_lookups,
            hit_tokens=self._num_hit_tokens,
            evictions=pool.num_evictions,
        )

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Lifetimes, idle times and reuse gaps of cached blocks, by the name of the metric."""
        return self._pool.histograms()

    def check(self) -> None:
        """Assert every invariant; run after each step in tests."""
        for table in self._tables.values():
            assert table.num_blocks == blocks_for(table.num_tokens, self.block_size)
            assert table.num_published <= table.num_tokens // self.block_size
            if table.has_own_room:
                assert self._read_only_block(table) is None, "a block that others read may be written"
            published = table.block_ids[: table.num_published].tolist()
            assert all(self._index.digest_of(b) is not None for b in published), "a published block is not findable"
        self._pool.check(self._references())
        self._index.check(self._pool.cacheable_ids)
        if self.states is not None:
            self.states.check(self._tables.keys())

    def _references(self) -> Iterator[int]:
        for table in self._tables.values():
            yield from table.block_ids.tolist()

    def _table_of(self, hit: PrefixHit) -> BlockTable:
        """A table over the blocks of a hit, which must still hold what was found in them."""
        found = tuple(map(self._index.digest_of, hit.block_ids))
        assert found == hit.digests, "the hit is stale: look up and fork without changing the cache in between"
        table = BlockTable(self.block_size, hit.tenant)
        for block_id in hit.block_ids:
            table.append(block_id)
        table.num_tokens, table.num_published = hit.num_tokens, len(hit.block_ids)
        return table

    def _read_only_block(self, table: BlockTable) -> int | None:
        """The last block, when the next position lies in it but must not be written there."""
        block_id = table.partial_block
        if block_id is None:
            return None
        is_read_only = self._pool.count(block_id) > 1 or self._index.digest_of(block_id) is not None
        return block_id if is_read_only else None

    def _copy_on_write(self, table: BlockTable, block_id: int) -> BlockCopy:
        target = self._allocate()
        table.replace(table.num_blocks - 1, target)
        self._pool.release([block_id])
        return BlockCopy(block_id, target, table.num_tokens % self.block_size)

    def _allocate(self) -> int:
        block_id = self._pool.allocate()
        self._forget(block_id)  # if it was evicted
        return block_id

    def _forget(self, block_id: int) -> None:
        if self.states is not None:
            self.states.forget(self._index.digest_of(block_id))
        self._index.remove(block_id)

    def _chain_end(self, table: BlockTable, tenant: str) -> bytes:
        """The digest that the next block of the sequence continues."""
        if table.num_published == 0:
            return self._hasher.root(tenant)
        digest = self._index.digest_of(int(table.block_ids[table.num_published - 1]))
        assert digest is not None
        return digest

    def _publish_block(self, table: BlockTable, digest: bytes) -> None:
        index = table.num_published
        own, first = int(table.block_ids[index]), self._index.find(digest)
        if first is None:
            self._index.add(digest, own)
            self._pool.mark_cacheable(own)
        elif first != own:  # two sequences computed the same at the same time: hold it once
            assert self._index.digest_of(own) is None
            self._pool.share([first])
            self._pool.release([table.replace(index, first)])
        table.num_published += 1

    def _unpublish(self, block_id: int) -> None:
        self._forget(block_id)
        self._pool.unmark_cacheable(block_id)
