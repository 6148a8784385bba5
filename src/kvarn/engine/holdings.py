"""Which sequences of the KV cache a request holds: mostly one, more where it computes in several contexts."""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.backends.batch import BlockCopy
from kvarn.decoding.decoder import Span
from kvarn.engine.plan import Entry
from kvarn.kv.cache import KVCache
from kvarn.request import Request


class Holdings:
    """Room for spans, in however many sequences they want it; all of a request's go back together."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._further: dict[str, set[str]] = {}  # sequences beside a request's own

    def extend(self, span: Span) -> Sequence[BlockCopy] | None:
        """Make room for what a span reads and writes; None: there is too little."""
        if span.reach is None:
            return self._kv.extend(span.request.id, span.end - self._kv.num_tokens(span.request.id))
        for name, num_slots in span.needs():
            if name != span.request.id:
                self._further.setdefault(span.request.id, set()).add(name)
            missing = num_slots - self._kv.num_tokens(name)
            copies = self._kv.extend(name, missing) if missing > 0 else []
            if copies is None:
                return None
            assert not copies, "sequences that are written over share whole blocks only"
        return ()

    def entry(self, span: Span, copies: Sequence[BlockCopy] = ()) -> Entry:
        """A span with the blocks it was given."""
        reach = span.reach
        if reach is None:
            return Entry(span, self._kv.block_ids(span.request.id), copies)
        kept = None if reach.keep is None else self._kv.block_ids(reach.keep.sequence)
        companion = None if reach.companion is None else self.entry(reach.companion)
        return Entry(span, self._kv.block_ids(reach.sequence), copies, kept, companion)

    def num_blocks(self, request: Request) -> int:
        """Blocks a request holds now."""
        names = (request.id, *self._further.get(request.id, ()))
        return sum(self._kv.blocks_for(self._kv.num_tokens(name)) for name in names)

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Give everything back; forget: leave nothing findable behind."""
        self._kv.release(request.id, forget=forget)
        for name in self._further.pop(request.id, ()):
            self._kv.release(name)
