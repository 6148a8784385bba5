"""The sequences of the KV cache that a request holds: mostly one, more where it computes in several contexts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvarn.backends.batch import BlockCopy
from kvarn.decoding.decoder import Decoder, Span
from kvarn.engine.scheduling.plan import BatchEntry, EntryStates
from kvarn.kv.cache import KVCache
from kvarn.kv.group import BlockGroup
from kvarn.request import Request


class KVAllocation:
    """Blocks for spans, in as many sequences as they need; all sequences of a request are released together."""

    def __init__(self, kv: KVCache, decoder: Decoder) -> None:
        self._kv = kv
        self._decoder = decoder
        self._extra_sequences: dict[str, set[str]] = {}  # sequences beside a request's own
        # At least what the running requests still want, in the plan being made; None: not known.
        self._most_wanted: list[int] | None = None  # by group

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
            return BatchEntry(
                span,
                self._kv.block_ids(span.request.id),
                copies,
                window_table=self._kv.window_ids(span.request.id),
                states=states[0] if states else None,
            )
        kept = None if reach.keep is None else self._kv.block_ids(reach.keep.sequence)
        companion = None if reach.companion is None else self.entry(reach.companion)
        return BatchEntry(span, self._kv.block_ids(reach.sequence), copies, kept, companion)

    def fits(
        self, request: Request, num_computed: int, running: Iterable[Request], leaving: Sequence[Request] = ()
    ) -> bool:
        """Whether a request's tokens fit beside the prompts and next tokens of those that run.

        leaving: others that would leave the blocks they hold; those they share with anybody would stay.
        Within a plan those that run want ever less, as they get blocks, so their sum is a bound that one who starts
        adds to: hundreds start without looking at each other.
        """
        groups = self._kv.groups
        num_left = [group.pool.num_free - self._num_to_start(group, request, num_computed) for group in groups]
        if leaving:
            running = list(running)
            held = [sum(self._num_held(group, other) for other in leaving) for group in groups]
            wanted = [self._num_to_continue(group, running) for group in groups]
            return all(w <= left + h for w, left, h in zip(wanted, num_left, held, strict=True))
        if not self._is_enough(num_left) or not self._decoder.has_divisible_spans:
            running = list(running)
            self._most_wanted = [self._num_to_continue(group, running) for group in groups]
        if not self._is_enough(num_left):
            return False
        assert self._most_wanted is not None, "enough, so it is known"
        added = [self._num_going_on(group, request) for group in groups]
        self._most_wanted = [w + a for w, a in zip(self._most_wanted, added, strict=True)]
        return True

    def _is_enough(self, num_left: list[int]) -> bool:
        """Whether so many blocks of each group are known to be enough for those that run."""
        wanted = self._most_wanted
        return wanted is not None and all(w <= left for w, left in zip(wanted, num_left, strict=True))

    def _num_to_start(self, group: BlockGroup, request: Request, num_computed: int) -> int:
        lengths, num_whole = self._decoder.slots_to_start(request), num_computed // self._kv.block_size
        wanted = sum(group.most_blocks(length, is_decoding=False) for length in lengths)
        return wanted - min(num_whole, group.num_held(request.id))

    def _num_to_continue(self, group: BlockGroup, running: Iterable[Request]) -> int:
        return sum(max(0, self._num_going_on(group, one) - self._num_held(group, one)) for one in running)

    def _num_going_on(self, group: BlockGroup, request: Request) -> int:
        """Blocks a running request holds at most when it has what it wants next."""
        lengths, is_decoding = self._decoder.slots_to_continue(request), not request.is_prefilling
        return sum(group.most_blocks(length, is_decoding=is_decoding) for length in lengths)

    def _num_held(self, group: BlockGroup, request: Request) -> int:
        """Blocks a request holds now."""
        return sum(map(group.num_held, (request.id, *self._extra_sequences.get(request.id, ()))))

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Release all sequences; forget: their blocks are not found by later requests."""
        if request.params.keep_cache and not forget:
            self._kv.keep(request.id, request.num_prompt)
        self._kv.release(request.id, unpublish=forget)
        for name in self._extra_sequences.pop(request.id, ()):
            self._kv.release(name)
