"""One step as data: the requests and positions to compute, and the batch for the backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from kvarn.adapters.weights import AdapterUse
from kvarn.backends.batch import Batch, BlockCopy, Canvases, Int32, Keep, StateSlots
from kvarn.decoding.decoder import Span
from kvarn.kv.cache import KVCache
from kvarn.request import Request


class EntryStates(NamedTuple):
    """The slots of recurrent states that a span reads and writes; saved: (row of the span, slot)."""

    read: int
    written: int
    saved: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, kv: KVCache, sequences: Iterable[str]) -> list[EntryStates]:
        """Those of the steps that were planned for some sequences; empty where the model has no states."""
        if kv.states is None:
            return []
        found = map(kv.states.state_of, sequences)
        return [cls(state.read, state.written, state.saved_rows()) for state in found]


class BatchEntry(NamedTuple):
    """One request's part: its span, its block ids, and the blocks to copy before it may write."""

    span: Span
    table: Int32
    copies: Sequence[BlockCopy] = ()
    kept_table: Int32 | None = None  # where the span's kept keys and values go
    companion: BatchEntry | None = None  # of the span's companion
    window_table: Int32 | None = None  # where some layers keep a window only
    states: EntryStates | None = None  # where the model has recurrent layers

    def without_drafts(self) -> BatchEntry:
        """The rows of what is known."""
        span = self.span
        if not span.num_drafts:
            return self
        num_known = len(span.token_ids) - span.num_drafts
        known = span._replace(token_ids=span.token_ids[:num_known], outputs=span.outputs[:num_known], num_drafts=0)
        return self._replace(span=known)


Draft = dict[str, BatchEntry]  # a step being planned: by request id, in the order of planning


@dataclass(frozen=True, slots=True)
class LayerwisePart:
    """A chunk that advances for some seconds beside the batch; its copies are made when it begins."""

    entry: BatchEntry
    seconds: float
    is_first: bool

    @property
    def copies(self) -> Sequence[BlockCopy]:
        return self.entry.copies if self.is_first else ()


class EntryRows(Protocol):
    """Entries that are made when asked for; see kvarn.engine.launching.decode_rows."""

    @property
    def requests(self) -> list[Request]: ...

    def entries(self) -> tuple[BatchEntry, ...]: ...


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Complete when made; without a batch and a layer-wise part there is nothing to do."""

    made: tuple[BatchEntry, ...] = ()
    batch: Batch | None = None
    layerwise: LayerwisePart | None = None
    decodes: EntryRows | None = None  # instead of made: one token more for each of some requests

    @property
    def entries(self) -> tuple[BatchEntry, ...]:
        return self.made if self.decodes is None else self.decodes.entries()

    @property
    def requests(self) -> list[Request]:
        """Of the batch."""
        return [entry.span.request for entry in self.made] if self.decodes is None else self.decodes.requests

    @property
    def row_counts(self) -> tuple[int, int]:
        """Decodes and prompt rows of the batch."""
        return count_rows(self.spans) if self.decodes is None else (len(self.decodes.requests), 0)

    @property
    def num_drafts(self) -> int:
        """Rows of guessed tokens."""
        return sum([entry.span.num_drafts for entry in self.made])

    @property
    def is_empty(self) -> bool:
        return self.batch is None and self.layerwise is None

    @property
    def spans(self) -> list[Span]:
        return [entry.span for entry in self.entries]

    @property
    def copies(self) -> list[BlockCopy]:
        copies = [copy for entry in self.made for copy in entry.copies]
        return copies if self.layerwise is None else [*copies, *self.layerwise.copies]


def count_rows(spans: Iterable[Span]) -> tuple[int, int]:
    """Decodes and prompt rows; a single row from which nothing is chosen belongs to a prompt. Drafts are neither."""
    lengths = [(len(span.token_ids) - span.num_drafts, bool(span.outputs)) for span in spans]
    num_decodes = lengths.count((1, True))
    return num_decodes, sum(length for length, _ in lengths) - num_decodes


def make_plan(entries: Sequence[BatchEntry], layerwise: LayerwisePart | None = None) -> StepPlan:
    """Lay the spans out as one ragged batch."""
    if not entries:
        return StepPlan(layerwise=layerwise)
    is_plain = all(entry.span.reach is None for entry in entries)
    parts = entries if is_plain else list(_parts(entries))
    spans = [entry.span for entry in parts]
    token_ids = np.array(list(chain.from_iterable([span.token_ids for span in spans])), np.int32)
    outputs = np.array(list(chain.from_iterable([span.outputs for span in spans])), np.int32)
    lengths = np.array([len(span.token_ids) for span in spans], np.int32)
    first = np.array([span.start for span in spans], np.int32)
    starts = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    batch = Batch(
        token_ids=token_ids,
        positions=np.arange(len(token_ids), dtype=np.int32) + np.repeat(first - starts[:-1], lengths),
        row_starts=starts,
        context_lens=first + lengths if is_plain else np.array([span.num_slots for span in spans], np.int32),
        block_tables=pad_tables([entry.table for entry in parts]),
        output_rows=outputs + np.repeat(starts[:-1], [len(span.outputs) for span in spans]),
        slot_shifts=None if is_plain else _slot_shifts(parts),
        keep=() if is_plain else tuple(_keeps(parts)),
        canvases=None if is_plain else _canvases(spans),
        window_tables=pad_window_tables([entry.window_table for entry in parts]),
        states=state_slots([entry.states for entry in parts if entry.states is not None], starts),
        adapters=adapters_of([span.request for span in spans]),
    )
    return StepPlan(tuple(entries), batch, layerwise)


def _parts(entries: Sequence[BatchEntry]) -> Iterator[BatchEntry]:
    """Every entry, and its companion right behind it."""
    for entry in entries:
        yield entry
        if entry.companion is not None:
            yield entry.companion


def adapters_of(requests: Sequence[Request]) -> tuple[tuple[AdapterUse, ...], ...]:
    """What each adds to the base; empty where nobody adds anything."""
    found = tuple([request.adapters for request in requests])
    return found if any(found) else ()


def state_slots(states: Sequence[EntryStates], starts: Int32) -> StateSlots | None:
    """The slots of all sequences of a batch whose rows begin at starts; None where the model has no states."""
    if not states:
        return None
    saved = [(first + row, slot) for first, state in zip(starts, states, strict=False) for row, slot in state.saved]
    return StateSlots(
        read=np.array([state.read for state in states], np.int32),
        written=np.array([state.written for state in states], np.int32),
        saved_rows=np.array([row for row, _ in saved], np.int32),
        saved_slots=np.array([slot for _, slot in saved], np.int32),
    )


def _slot_shifts(parts: Sequence[BatchEntry]) -> Int32 | None:
    shifts = [0 if part.span.reach is None else part.span.reach.slot_shift for part in parts]
    return np.array(shifts, np.int32) if any(shifts) else None


def _canvases(spans: Sequence[Span]) -> Canvases | None:
    parts = [None if span.reach is None else span.reach.canvas for span in spans]
    if not any(parts):
        return None
    starts = [span.end if part is None else part.start for span, part in zip(spans, parts, strict=True)]
    return Canvases(np.array(starts, np.int32), tuple([None if part is None else part.feedback for part in parts]))


def _keeps(parts: Sequence[BatchEntry]) -> Iterator[Keep]:
    for index, part in enumerate(parts):
        wanted = None if part.span.reach is None else part.span.reach.keep
        if wanted is not None:
            assert part.kept_table is not None
            yield Keep(
                sequence=index,
                block_start=wanted.block_start,
                block_end=wanted.block_end,
                num_kept=wanted.num_kept,
                table=part.kept_table,
                per_head=wanted.per_head,
                pool_kernel=wanted.pool_kernel,
            )


def pad_tables(tables: Sequence[Int32]) -> Int32:
    """Stack tables of different lengths; -1 pads."""
    stacked = np.full((len(tables), max(len(table) for table in tables)), -1, np.int32)
    for row, table in enumerate(tables):
        stacked[row, : len(table)] = table
    return stacked


def pad_window_tables(tables: Sequence[Int32 | None]) -> Int32 | None:
    """The same of what kv.window_ids() gave; None where the model has no windows."""
    found = [table for table in tables if table is not None]
    return pad_tables(found) if found else None
