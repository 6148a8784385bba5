"""Captured decode steps: a batch of one row per sequence is one copy to the device and one launch.

A graph is captured when its size is first met: for so many rows, and for so many pieces of keys where sequences are few
enough that their pieces are computed side by side. All graphs read the same inputs and share one pool of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvarn.backends.batch import Batch
from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.cuda.greedy import most_probable
from kvarn.backends.torch.cuda.ops import BUCKETS, CudaOps
from kvarn.backends.torch.layers import Decoded, Model
from kvarn.backends.torch.step import PagedTiles, Step, token_slots

TOKEN, POSITION, SLOT, CONTEXT, SHIFT, COUNT = range(6)  # what is staged of every row
PADDING = np.array([0, 0, -1, 0, 0, 0], np.int32)  # a row without queries and without a slot


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph and the memory in which it leaves its results."""

    graph: torch.cuda.CUDAGraph
    left: Decoded


class DecodeGraphs:
    """The captured steps of one model and its cache."""

    def __init__(self, model: Model, cache: DeviceCache, max_context: int) -> None:
        assert isinstance(model.ops, CudaOps), "only kernels can be captured"
        self._model, self._cache, self._ops = model, cache, model.ops
        self._width = -(-max_context // cache.block_size)
        self._graphs: dict[tuple[int, int], Captured] = {}
        self._pool: Any = None  # of the first graph, shared by all
        most = BUCKETS[-1]
        self._staged = torch.zeros(len(PADDING), most, dtype=torch.int32, pin_memory=True)
        self._staged_tables = torch.zeros(most, self._width, dtype=torch.int32, pin_memory=True)
        self._inputs = self._staged.to(cache.device)
        self._tables = self._staged_tables.to(cache.device)
        self._rows = torch.arange(most, dtype=torch.int32, device=cache.device)

    def run(self, batch: Batch) -> Decoded | None:
        """Compute a decode step; None where the batch is something else or too large."""
        num_rows = len(batch.token_ids)
        if not self._is_decode(batch, num_rows):
            return None
        bucket = next(size for size in BUCKETS if num_rows <= size)
        self._stage(batch, num_rows, bucket)
        key = bucket, self._ops.pieces_of(bucket, int(batch.context_lens.max()))
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._capture(*key)
        found.graph.replay()
        left = found.left
        logits, greedy = (None if one is None else one[:num_rows] for one in (left.logits, left.greedy))
        return Decoded(left.hidden[:num_rows].clone(), logits, greedy)

    def _is_decode(self, batch: Batch, num_rows: int) -> bool:
        fits = 0 < num_rows <= BUCKETS[-1] and batch.block_tables.shape[1] <= self._width
        is_decode = num_rows == len(batch.context_lens) == len(batch.output_rows) and not batch.keep
        return fits and is_decode and batch.block_tables.shape[1] > 0

    def _stage(self, batch: Batch, num_rows: int, bucket: int) -> None:
        """Write the batch to pinned memory and begin its copy; rows beyond it have no queries and no slot."""
        torch.cuda.current_stream().synchronize()  # the last copy has read this memory
        rows, tables = self._staged.numpy(), self._staged_tables.numpy()
        rows[:, num_rows:bucket] = PADDING[:, None]
        rows[TOKEN, :num_rows] = batch.token_ids
        rows[POSITION, :num_rows] = batch.positions
        rows[SLOT, :num_rows] = token_slots(batch, self._cache.block_size)
        rows[CONTEXT, :num_rows] = batch.context_lens
        rows[SHIFT, :num_rows] = 0 if batch.slot_shifts is None else batch.slot_shifts
        rows[COUNT, :num_rows] = 1
        tables[:num_rows, : batch.block_tables.shape[1]] = np.maximum(batch.block_tables, 0)
        self._inputs.copy_(self._staged, non_blocking=True)
        self._tables[:bucket].copy_(self._staged_tables[:bucket], non_blocking=True)

    def _capture(self, bucket: int, num_pieces: int) -> Captured:
        step = self._step(bucket, num_pieces)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and chooses matmuls; harmless: the real step writes the same
            self._forward(step)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            left = self._forward(step)
        self._pool = graph.pool()
        return Captured(graph, left)

    def _step(self, bucket: int, num_pieces: int) -> Step:
        row = self._inputs[:, :bucket]
        each = self._rows[:bucket]
        tables = self._tables[:bucket]
        tiles = PagedTiles(tables, row[CONTEXT], row[SHIFT], each, each, row[COUNT], num_pieces, tile=1)
        empty = np.empty(0, np.int32)
        nothing = Batch(empty, empty, empty, empty, empty, empty)
        return Step(nothing, bucket, row[TOKEN], row[POSITION], row[SLOT], None, tiles)

    def _forward(self, step: Step) -> Decoded:
        model = self._model
        x = model.embed(step)
        for index in range(len(model.weights.blocks)):
            x = model.run_block(x, index, step, self._cache)
        hidden = model.finish(x, step)
        if model.weights.head is None:
            return Decoded(hidden, None, None)
        logits = model.logits(hidden)
        return Decoded(hidden, logits, most_probable(logits))
