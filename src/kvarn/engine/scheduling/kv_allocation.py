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

    def extend(self, span: Span) -> Sequence[BlockCopy] | None:
        """Allocate blocks for what a span reads and writes; None: there are too few."""
        if span.reach is None:
            if self._kv.num_tokens(span.request.id) > span.start:  # a plan was interrupted before it was made
                self._kv.trim(span.request.id, span.start)
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
        return self._num_wanted(request, num_computed, staying) <= self._kv.num_free + num_leaving

    def fits(self, request: Request, num_computed: int, running: Iterable[Request]) -> bool:
        """Whether a request's tokens fit beside the prompts and next tokens of those that run."""
        return self._num_wanted(request, num_computed, running) <= self._kv.num_free

    def num_blocks(self, request: Request) -> int:
        """Blocks a request holds now."""
        names = (request.id, *self._extra_sequences.get(request.id, ()))
        return sum(self._kv.blocks_for(self._kv.num_tokens(name)) for name in names)

    def _num_wanted(self, request: Request, num_computed: int, running: Iterable[Request]) -> int:
        kv = self._kv
        wanted = sum(map(kv.blocks_for, self._decoder.slots_to_start(request))) - num_computed // kv.block_size
        for other in running:
            needed = sum(map(kv.blocks_for, self._decoder.slots_to_continue(other)))
            wanted += max(0, needed - self.num_blocks(other))
        return wanted

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Release all sequences; forget: their blocks are not found by later requests."""
        self._kv.release(request.id, unpublish=forget)
        for name in self._extra_sequences.pop(request.id, ()):
            self._kv.release(name)
