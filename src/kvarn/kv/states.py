"""Slots of recurrent states: two of each sequence, and snapshots at block borders that others start from.

A step reads one slot and writes another, so it can be repeated, and a state that lies behind the last token of a block
is a snapshot without a copy: nobody writes it again. Ids only, never a tensor; knows digests of prefixes, never tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from kvarn.kv.pool import BlockPool
from kvarn.kv.prefix import PrefixIndex
from kvarn.models.recurrent import MIN_STATES, SLOTS_OF_SEQUENCE

NO_STATE = -1


@dataclass(slots=True)
class SequenceState:
    """The step that was planned last: it leads from the state in read, behind start tokens, to that in written."""

    read: int = NO_STATE  # zeros
    start: int = 0
    written: int = NO_STATE
    end: int = 0
    saves: dict[int, int] = field(default_factory=dict)  # by tokens: further slots that the step writes
    saves_any: bool = True  # whether somebody will read what it leaves behind
    branch: int = 0  # where others went on differently: the next to come by will want a snapshot there
    last: bytes | None = None  # its newest snapshot that was made while it decoded

    def saved_rows(self) -> list[tuple[int, int]]:
        """(row of the step, slot) of the further states."""
        saves = sorted(self.saves.items())
        return [(tokens - self.start - 1, slot) for tokens, slot in saves if self.start < tokens < self.end]

    def slots(self) -> list[int]:
        return [slot for slot in (self.read, self.written, *self.saves.values()) if slot != NO_STATE]


class StateCache:
    """Half of the slots are for sequences, two for each; the others, and what they leave, for snapshots.

    The least recently used snapshot goes first.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        assert num_slots >= MIN_STATES, f"a sequence needs {MIN_STATES} slots"
        self.max_sequences = max(2, num_slots // SLOTS_OF_SEQUENCE)
        self.keeps_snapshots = True  # somebody publishes what was computed
        self._block_size = block_size
        self._pool = BlockPool(num_slots)
        self._index = PrefixIndex()
        self._sequences: dict[str, SequenceState] = {}

    def longest(self, digests: Sequence[bytes]) -> int:
        """How many of the blocks of a prefix lie before its last snapshot."""
        found = (count for count in range(len(digests), 0, -1) if self._index.find(digests[count - 1]) is not None)
        return next(found, 0)

    def begin(self, sequence: str, digests: Sequence[bytes], branch: int, *, saves_any: bool = True) -> None:
        """Start a sequence on the snapshot behind the last of these blocks; on zeros without any.

        saves_any: False for one that is never published, so that it takes no slot from those that are.
        """
        assert sequence not in self._sequences, f"sequence {sequence} already has a state"
        state = SequenceState(branch=branch, saves_any=saves_any)
        if digests:
            slot = self._index.find(digests[-1])
            assert slot is not None, "the hit is stale: the snapshot is gone"
            self._pool.share([slot])
            state.read, state.start = slot, len(digests) * self._block_size
            state.end = state.start
        self._sequences[sequence] = state

    def extend(self, sequence: str, start: int, end: int) -> None:
        """Plan a step over the tokens start .. end - 1; the one before it counts as done if it ended at start."""
        if sequence not in self._sequences:
            self.begin(sequence, (), 0)
        state = self._sequences[sequence]
        if start == state.end > state.start:
            if state.read != NO_STATE:
                self._pool.release([state.read])
            state.read, state.start, state.written = state.written, start, NO_STATE
        assert start == state.start, f"a step begins at {start}, the state lies behind {state.start} tokens"
        if state.written == NO_STATE:
            state.written = self._allocate()
        state.end = end
        for tokens in ((end - 1) // self._block_size * self._block_size, state.branch):
            if state.saves_any and start < tokens < end and tokens not in state.saves and self._can_save:
                state.saves[tokens] = self._allocate()

    def state_of(self, sequence: str) -> SequenceState:
        return self._sequences[sequence]

    def publish(self, sequence: str, num_tokens: int, digest: bytes, *, is_decoding: bool) -> None:
        """The sequence has computed a block that ends here: the state behind it, if it was kept, can be found now."""
        state = self._sequences[sequence]
        slot = state.saves.pop(num_tokens, NO_STATE)
        if slot == NO_STATE and num_tokens == state.end > state.start:
            slot = state.written
            self._pool.share([slot])
        if slot == NO_STATE:
            return
        if self._index.find(digest) is None and self._index.digest_of(slot) is None:
            self._index.add(digest, slot)
            self._pool.mark_cacheable(slot)
            if is_decoding:
                self.forget(state.last)
                state.last = digest
        self._pool.release([slot])

    def trim(self, sequence: str, num_tokens: int) -> None:
        """Undo the step that was planned last, or nothing."""
        state = self._sequences[sequence]
        assert num_tokens in (state.start, state.end), (
            f"the states behind {state.start} and {state.end} tokens are held"
        )
        state.end = num_tokens
        for tokens in [tokens for tokens in state.saves if tokens > num_tokens]:  # nobody wrote them
            self._pool.release([state.saves.pop(tokens)])

    def release(self, sequence: str) -> None:
        """Free what a sequence holds; its snapshots stay."""
        state = self._sequences.pop(sequence, None)
        for slot in [] if state is None else state.slots():
            self._pool.release([slot])

    def forget(self, digest: bytes | None) -> None:
        """Drop the snapshot behind a block."""
        slot = None if digest is None else self._index.find(digest)
        if slot is not None:
            self._index.remove(slot)
            self._pool.unmark_cacheable(slot)

    def keep(self, digests: Sequence[bytes]) -> None:
        """Evict the last snapshot of a prefix after those of others."""
        count = self.longest(digests)
        slot = self._index.find(digests[count - 1]) if count else None
        if slot is not None:
            self._pool.keep([slot])

    def reclaim(self) -> list[int]:
        """Free slots whose memory may go back to the system: each once, until it is used again."""
        return self._pool.reclaim()

    @property
    def num_slots(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        """Slots that sequences hold; the snapshots of others give way when room is needed."""
        return self._pool.num_blocks - self._pool.num_free

    def check(self, sequences: Set[str]) -> None:
        """Assert every invariant."""
        assert self._sequences.keys() <= sequences, "a state belongs to no sequence"
        self._pool.check(self._references())
        self._index.check(self._pool.cacheable_ids)
        assert self._pool.num_free >= self._num_reserved, "a sequence may find no slot"

    @property
    def _num_reserved(self) -> int:
        """Slots that sequences, those to come included, may still need."""
        held = {slot for state in self._sequences.values() for slot in (state.read, state.written)} - {NO_STATE}
        return max(0, 2 * self.max_sequences - len(held))

    @property
    def _can_save(self) -> bool:
        return self.keeps_snapshots and self._pool.num_free > self._num_reserved

    def _allocate(self) -> int:
        slot = self._pool.allocate()
        self._index.remove(slot)  # if it was evicted
        return slot

    def _references(self) -> Iterator[int]:
        for state in self._sequences.values():
            yield from state.slots()
