"""Bookkeeping of the paged KV cache: ids only, never a tensor.

Two rules make sharing safe: positions are written only after extend() granted them, and extend() never grants a
position in a block that is shared or published. It never decides which request to preempt: extend returns None
when there is no room, and the scheduler decides what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import BlockCopy
from kvarn.kv.group import BlockGroup, WindowShape
from kvarn.kv.journal import PrefixJournal
from kvarn.kv.pool import KVStats
from kvarn.kv.prefix import BlockHasher, PrefixHit
from kvarn.kv.states import StateCache
from kvarn.kv.table import BlockTable, blocks_for
from kvarn.observe.histogram import HistogramSnapshot


class KVCache:
    """Block tables of all sequences: of the layers that keep all, and of those that keep a window."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        hash_key: bytes | None = None,
        num_states: int = 0,
        window: WindowShape | None = None,
    ) -> None:
        """num_states: slots for the states of recurrent layers; 0: the model has none."""
        self.block_size = block_size
        self.states = StateCache(num_states, block_size) if num_states else None
        self._hasher = BlockHasher(block_size, hash_key)
        self._full = BlockGroup(0, num_blocks, block_size, None, self._forget_beside)
        self._window = None
        if window is not None:
            self._window = BlockGroup(1, window.num_blocks, block_size, window, lambda _digest: None)
        self.groups = (self._full,) if self._window is None else (self._full, self._window)
        self.journal: PrefixJournal | None = None  # set where others are told what is held
        self._num_lookups = self._num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        return self._full.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks no sequence holds, including cached ones, which can be evicted."""
        return self._full.pool.num_free

    @property
    def max_tokens(self) -> int:
        """The longest sequence the whole cache could hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether one more sequence of so many positions could be computed, step by step, without another's blocks."""
        return all(g.most_blocks(num_tokens, is_decoding=False) <= g.pool.num_free for g in self.groups)

    def lookup(self, token_ids: Sequence[int], tenant: str = "") -> PrefixHit:
        """Find the longest published prefix in full blocks that a sequence can start behind: with windows it ends where
        they are whole, with recurrent layers in a snapshot; the last token is always left to compute."""
        self._num_lookups += 1
        block_ids, digests = [], []
        for digest in self._hasher.chain(self._hasher.root(tenant), token_ids, 0, len(token_ids) - 1):
            block_id = self._full.index.find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
            digests.append(digest)
        count = self._startable(digests)
        found = tuple(block_ids[:count]), tenant, tuple(digests[:count])
        return PrefixHit(count * self.block_size, *found, num_matched=len(digests) * self.block_size)

    def digests(self, token_ids: Sequence[int], tenant: str = "") -> list[bytes]:
        """Of all full blocks of a prompt that lookup() could find."""
        return list(self._hasher.chain(self._hasher.root(tenant), token_ids, 0, len(token_ids) - 1))

    def find(self, digest: bytes) -> int | None:
        """The published block of a digest; of the layers that keep all."""
        return self._full.index.find(digest)

    def can_fork(self, source: str, num_tokens: int) -> bool:
        """Whether a sequence may start on the first num_tokens positions of another, which holds more."""
        # A recurrent state is taken over from a snapshot only.
        return self.states is None and all(group.can_start(source, num_tokens) for group in self.groups)

    def fork(self, sequence: str, source: str | PrefixHit, num_tokens: int | None = None) -> None:
        """Start a sequence on the first num_tokens positions of another, or of a hit, sharing their blocks."""
        assert self.num_tokens(sequence) == 0, f"sequence {sequence} already holds blocks"
        if self.states is not None:
            assert isinstance(source, PrefixHit), "a recurrent state is taken over from a snapshot only"
            self.states.begin(sequence, source.digests, source.num_matched)
        for group in self.groups:
            if isinstance(source, PrefixHit):
                origin = group.table_of(source.digests, source.tenant)
            else:
                origin = group.tables[source]
            group.share(sequence, origin, origin.num_tokens if num_tokens is None else num_tokens)
        if isinstance(source, PrefixHit):
            self._num_hit_tokens += self.num_tokens(sequence)

    def extend(self, sequence: str, num_tokens: int) -> list[BlockCopy] | None:
        """Make room for num_tokens more positions; None and no change when a pool cannot.

        The copies must be made in the order they were returned and before the step writes anything. A sequence whose
        copies were not made holds nothing of use in its last block: release it, or trim it to a block's edge.
        """
        if not all(group.has_room(sequence, num_tokens) for group in self.groups):
            return None
        copies = [copy for group in self.groups for copy in group.extend(sequence, num_tokens)]
        if self.states is not None:
            end = self.num_tokens(sequence)
            self.states.extend(sequence, end - num_tokens, end)
        return copies

    def extend_to(self, sequence: str, num_tokens: int) -> Sequence[BlockCopy] | None:
        """Make room up to num_tokens positions as extend() does, quickly for one more in a block it owns."""
        table = self._full.tables.get(sequence)
        if table is None:
            return self.extend(sequence, num_tokens)
        is_next = table.num_tokens + 1 == num_tokens and table.has_own_room and self.states is None
        if is_next and (self._window is None or self._window.extend_in_block(sequence)):
            table.num_tokens = num_tokens
            return ()
        return self.extend(sequence, num_tokens - table.num_tokens)

    def extend_each(self, sequences: Sequence[str], num_tokens: Sequence[int]) -> list[int] | None:
        """One more position for each of several sequences that hold num_tokens; the versions of their tables.

        None and no change where one of them does not, would need a copy or has states, or the pool has too few blocks.
        """
        if self.states is not None:
            return None
        found = self._full.extendable(sequences, num_tokens)
        if found is None or self._window is None:
            return None if found is None else self._full.extend_each(found)
        in_window = self._window.extendable(sequences, num_tokens)
        if in_window is None:
            return None
        versions = self._full.extend_each(found), self._window.extend_each(in_window)
        return [sum(both) for both in zip(*versions, strict=True)]

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
        table = self._full.tables[sequence]
        start = table.num_published * self.block_size
        stop = min(len(token_ids), table.num_tokens)
        if num_computed is not None and num_computed < stop:
            stop = num_computed
        if stop - start < self.block_size:
            return
        assert table.tenant in (None, tenant), f"sequence {sequence} belongs to another tenant"
        table.tenant = tenant
        parent = self._chain_end(table, tenant)
        for digest in self._hasher.chain(parent, token_ids, start, stop):
            number = table.num_published
            if self.journal is not None and self._full.index.find(digest) is None:
                self.journal.stored(digest, parent if number else None, (number + 1) * self.block_size)
            parent = digest
            for group in self.groups:
                group.publish_block(sequence, number, digest)
            if self.states is not None:
                end = table.num_published * self.block_size
                self.states.publish(sequence, end, digest, is_decoding=is_decoding)

    def name_texts(self, sequence: str, num_prompt: int, marks: Sequence[tuple[int, int]]) -> None:
        """Tell the journal which texts end in which published blocks; marks: see TextPrefix."""
        if self.journal is not None:
            self.journal.name_texts(self._full.published(sequence), num_prompt // self.block_size, marks)

    def advance(self, sequence: str, num_computed: int) -> None:
        """The first num_computed positions are computed for good: free what lies before the window of the next."""
        if self._window is not None:
            self._window.advance(sequence, num_computed)

    def keep(self, sequence: str, num_tokens: int) -> None:
        """Evict what is published of a sequence's first positions after the prefixes of others, up to a bound."""
        for group in self.groups if self.num_tokens(sequence) else ():
            group.keep(sequence, num_tokens)
        if self.states is not None and self.num_tokens(sequence):
            self.states.keep(self._full.published(sequence)[: num_tokens // self.block_size])

    def trim(self, sequence: str, num_tokens: int) -> None:
        """Roll back to the first num_tokens positions; what was published stays findable."""
        assert 0 <= num_tokens <= self.num_tokens(sequence)
        if self.states is not None:
            self.states.trim(sequence, num_tokens)
        for group in self.groups:
            group.trim(sequence, num_tokens)

    def release(self, sequence: str, *, unpublish: bool = False) -> None:
        """Free a sequence; unpublish also its blocks that no other sequence holds. Unknown sequences hold nothing."""
        if self.states is not None:
            self.states.release(sequence)
        for group in reversed(self.groups):
            group.release(sequence, unpublish=unpublish)

    def reclaim(self, *, drop_cached: bool = False, group: int = 0) -> list[int]:
        """Return free blocks of a group whose memory may go back to the system: each once, until it is used again.

        Call it between steps, when no copy is outstanding. drop_cached includes the cached blocks.
        """
        chosen = self.groups[group]
        if drop_cached:
            for block_id in chosen.pool.cached_ids:
                chosen.unpublish(block_id)
        return chosen.pool.reclaim()

    def block_ids(self, sequence: str) -> npt.NDArray[np.int32]:
        return self._full.tables[sequence].block_ids

    def window_ids(self, sequence: str) -> npt.NDArray[np.int32] | None:
        """Block ids of the layers that keep a window, -1 where they were freed; None where the model has none."""
        return None if self._window is None else self._window.tables[sequence].block_ids

    def num_tokens(self, sequence: str) -> int:
        table = self._full.tables.get(sequence)
        return 0 if table is None else table.num_tokens

    def stats(self, group: int = 0) -> KVStats:
        chosen = self.groups[group]
        pool = chosen.pool
        return KVStats(
            num_blocks=pool.num_blocks,
            used=pool.num_blocks - pool.num_free,
            cached=pool.num_cached,
            shared=pool.num_shared,
            free=pool.num_free - pool.num_cached,
            unused_slots=sum(table.num_unused_slots for table in chosen.tables.values()),
            lookups=self._num_lookups,
            hit_tokens=self._num_hit_tokens,
            evictions=pool.num_evictions,
        )

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Lifetimes, idle times and reuse gaps of cached blocks, by the name of the metric."""
        return self._full.pool.histograms()

    def check(self) -> None:
        """Assert every invariant; run after each step in tests."""
        for group in self.groups:
            group.check()
            assert group.tables.keys() == self._full.tables.keys(), "a sequence is in some groups only"
            lengths = {name: table.num_tokens for name, table in group.tables.items()}
            assert lengths == {name: table.num_tokens for name, table in self._full.tables.items()}
            assert group.index.digests <= self._full.index.digests, "what lies before a published block is not findable"
        if self.states is not None:
            self.states.check(self._full.tables.keys())

    def _startable(self, digests: Sequence[bytes]) -> int:
        """How many of the blocks of a prefix lie before the last place where a sequence can start."""
        count = len(digests)
        while count:
            longest = count if self._window is None else self._window.longest(digests[:count])
            longest = longest if self.states is None else self.states.longest(digests[:longest])
            if longest == count:
                break
            count = longest
        return count

    def _forget_beside(self, digest: bytes) -> None:
        """A block of all tokens is lost: nobody finds what other layers keep of the same ones."""
        if self.journal is not None:
            self.journal.lost(digest)
        if self.states is not None:
            self.states.forget(digest)
        if self._window is not None:
            self._window.forget(digest)

    def _chain_end(self, table: BlockTable, tenant: str) -> bytes:
        """The digest that the next block of the sequence continues."""
        if table.num_published == 0:
            return self._hasher.root(tenant)
        digest = self._full.index.digest_of(int(table.block_ids[table.num_published - 1]))
        assert digest is not None
        return digest
