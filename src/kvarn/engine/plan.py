"""One step as data: whose positions are computed, and the batch that says so to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvarn.backends.batch import Batch, BlockCopy, Int32
from kvarn.decoding.decoder import Span


@dataclass(frozen=True, slots=True)
class Plan:
    """Born complete; batch is None only when there is nothing to do."""

    spans: tuple[Span, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    batch: Batch | None = None

    @property
    def is_empty(self) -> bool:
        return self.batch is None


def make_plan(spans: Sequence[Span], tables: Sequence[Int32], copies: Sequence[BlockCopy]) -> Plan:
    """Lay the spans out as one ragged batch; tables[i] are the block ids of spans[i]."""
    if not spans:
        return Plan()
    outputs: list[int] = []
    starts = [0]
    for span in spans:
        outputs.extend(starts[-1] + offset for offset in span.outputs)
        starts.append(starts[-1] + len(span.token_ids))
    batch = Batch(
        token_ids=np.concatenate([np.asarray(span.token_ids, np.int32) for span in spans]),
        positions=np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in spans]),
        row_starts=np.array(starts, np.int32),
        context_lens=np.array([span.end for span in spans], np.int32),
        block_tables=pad_tables(tables),
        output_rows=np.array(outputs, np.int32),
    )
    return Plan(tuple(spans), tuple(copies), batch)


def pad_tables(tables: Sequence[Int32]) -> Int32:
    """Stack tables of different lengths; -1 pads."""
    stacked = np.full((len(tables), max(len(table) for table in tables)), -1, np.int32)
    for row, table in enumerate(tables):
        stacked[row, : len(table)] = table
    return stacked
