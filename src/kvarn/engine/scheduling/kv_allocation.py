"""The sequences of the KV cache that a request holds: mostly one, more where it computes in several contexts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvarn.backends.batch import BlockCopy
from kvarn.decoding.decoder import Decoder, Span
from kvarn.engine.scheduling.plan import BatchEntry, EntryStates
from kvarn.kv.cache import KVCache
from kvarn.request import Request


class KVAllocation:
    """Blocks for spans, in as many sequences as they need; all sequences of a request are released together."""

    def __init__(self, kv: KVCache, decoder: Decoder) -> None:
        self._kv = kv
        self._decoder = decoder
        self._extra_sequences: dict[str, set[str]] = {}  # sequences beside a request's own
        # At least what the running requests still want, in the plan being made; None: not known.
        self._most_wanted: int | None = None

    def begin_plan(self) -> None:
        """What running requests want has changed since the last plan."""
        self._most_wanted = None

    def extend(self, span: Span) -> Sequence[BlockCopy] | None:
        """Allocate blocks for what a span reads and writes; None: there are too few."""
        if span.reach is None:
            if self._kv.num_tokens(span.request.id) > span.start:  # a plan was interrupted before it was made
                self._kv.trim(span.request.id, span.start)
                self._most_wanted = None
            return self._kv.extend_to(span.request.id, span.end)
        for name, num_slots in span.needs():
            if name != span.request.id:
                self._extra_sequences.setdefault(span.request.id, set()).add(name)
            missing = num_slots - self._kv.num_tokens(name)
            copies = self._kv.extend(name, missing) if missing > 0 else []
            if copies is None:
                return None
            assert not copies, "sequences that are written over share whole blocks only"
        return ()

    def entry(self, span: Span, copies: Sequence[BlockCopy] = ()) -> BatchEntry:
        """A span with its blocks."""
        reach = span.reach
        if reach is None:
            states = EntryStates.of(self._kv, [span.request.id])
            return BatchEntry(span, self._kv.block_ids(span.request.id), copies, states=states[0] if states else None)
        kept = None if reach.keep is None else self._kv.block_ids(reach.keep.sequence)
        companion = None if reach.companion is None else self.entry(reach.companion)
        return BatchEntry(span, self._kv.block_ids(reach.sequence), copies, kept, companion)

    def could_fit(self, request: Request, num_computed: int, staying: Iterable[Request], num_leaving: int) -> bool:
        """Whether it might if others left the blocks they hold; those they share with anybody would stay."""
        num_wanted = self._num_to_start(request, num_computed) + self._num_to_continue(staying)
        return num_wanted <= self._kv.num_free + num_leaving

    def fits(self, request: Request, num_computed: int, running: Iterable[Request]) -> bool:
        """Whether a request's tokens fit beside the prompts and next tokens of those that run.

        Within a plan those that run want ever less, as they get blocks, so their sum is a bound that one who starts
        adds to: hundreds start without looking at each other.
        """
        num_left = self._kv.num_free - self._num_to_start(request, num_computed)
        if self._most_wanted is None or self._most_wanted > num_left or not self._decoder.has_divisible_spans:
            self._most_wanted = self._num_to_continue(running)
        if self._most_wanted > num_left:
            return False
        self._most_wanted += self._num_slot_blocks(self._decoder.slots_to_continue(request))
        return True

    def num_blocks(self, request: Request) -> int:
        """Blocks a request holds now."""
        names = (request.id, *self._extra_sequences.get(request.id, ()))
        return sum(self._kv.blocks_for(self._kv.num_tokens(name)) for name in names)

    def _num_to_start(self, request: Request, num_computed: int) -> int:
        return self._num_slot_blocks(self._decoder.slots_to_start(request)) - num_computed // self._kv.block_size

    def _num_to_continue(self, running: Iterable[Request]) -> int:
        needed = ((self._num_slot_blocks(self._decoder.slots_to_continue(one)), one) for one in running)
        return sum(max(0, num_blocks - self.num_blocks(one)) for num_blocks, one in needed)

    def _num_slot_blocks(self, slots: Iterable[int]) -> int:
        return sum(map(self._kv.blocks_for, slots))

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Release all sequences; forget: their blocks are not found by later requests."""
        self._kv.release(request.id, unpublish=forget)
        for name in self._extra_sequences.pop(request.id, ()):
            self._kv.release(name)
