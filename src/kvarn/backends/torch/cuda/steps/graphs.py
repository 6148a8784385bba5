"""Captured steps: a batch is one copy to the device and one launch, whatever decodes and prompts are in it.

Batches are padded to few shapes; a graph is captured when its shape is first met. All graphs read the same inputs and
share one pool of memory, so only one of them may be under way.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvarn.backends.batch import Batch, Int32
from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.cuda.greedy import most_probable
from kvarn.backends.torch.cuda.ops import BUCKETS, MULTIPLE, CudaOps
from kvarn.backends.torch.cuda.rows import fed_tokens
from kvarn.backends.torch.denoising.confidence import confident_rows
from kvarn.backends.torch.layers import Decoded, Model
from kvarn.backends.torch.mixers.recurrent import STATE_ROWS, StateRows, state_arrays
from kvarn.backends.torch.step import PagedTiles, Step, cut_rows, of_windows, token_slots
from kvarn.models.spec import MaskedDiffusion

MAX_SEQUENCES = 256
PROMPT_ROWS = (128, 256, 512, 1024, 2048)  # of a step with prompts ...
MAX_ROWS = 16384  # ... and, up to so many, as many as a full step of the engine has ...
LEAST_FULL = 15 / 16  # ... which fewer rows may use, padded
DENOISING_ROWS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # of a step of blocks and whole canvases
OUTPUTS = (16, 256)  # rows of such a step whose states are wanted
DENOISING_OUTPUTS = (32, 128, 256, 512)
# The staged arrays, one after the other in one buffer, and what stands in them where a batch has nothing.
PADDING = {
    "token": 0,
    "position": 0,
    "slot": -1,
    "context": 0,
    "shift": 0,
    "sequence": 0,
    "first": 0,
    "count": 0,
    "output": 0,
}
STATE_PADDING = {"begins": 0, "read": -1, "written": -1, "saved": -1, "firsts": 0, "ends": 0}  # recurrent.StateRows
WINDOW_PADDING = {"window_slot": -1}
FEW_SEQUENCES = 16
TIMED_REPLAYS = 6


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for."""

    rows: int
    outputs: int  # the same as rows: all of them, in order
    tile: int  # queries of one tile
    tiles: int
    key_tiles: int  # computed side by side

    @property
    def is_decode(self) -> bool:
        return self.tile == 1

    @property
    def sequences(self) -> int:
        """At most so many."""
        return self.rows if self.is_decode else self.tiles - self.rows // self.tile


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph and the memory in which it leaves its results."""

    graph: torch.cuda.CUDAGraph
    left: Decoded


class Inputs:
    """The staged arrays of a step of at most so many rows, on the host and on the device."""

    def __init__(self, num_arrays: int, size: int, device: torch.device) -> None:
        self.staged = torch.zeros(num_arrays, size, dtype=torch.int32, pin_memory=True)
        self.on_device = self.staged.to(device)


class CapturedSteps:
    """The captured steps of one model and its cache."""

    def __init__(self, model: Model, cache: DeviceCache, chosen: Tensor, max_context: int, max_rows: int = 0) -> None:
        """chosen: where the tokens of the last step lie that the host has not read; max_rows: of the engine's steps."""
        assert isinstance(model.ops, CudaOps), "only kernels can be captured"
        self._model, self._cache, self._ops = model, cache, model.ops
        self._chosen = chosen
        self._width = -(-max_context // cache.block_size)
        self._generation = model.weights.spec.generation
        is_denoising = isinstance(self._generation, MaskedDiffusion)
        self._rows: tuple[int, ...] = DENOISING_ROWS if is_denoising else prompt_rows(max_rows)
        self._outputs: tuple[int, ...] = DENOISING_OUTPUTS if is_denoising else OUTPUTS
        self._graphs: dict[StepShape, Captured] = {}
        self._pool: Any = None  # of the first graph, shared by all
        self._stream = torch.cuda.Stream()  # one for all captures: memory of the last is free for the next
        self._has_windows = any(cache.windowed)
        self._padding = PADDING | (STATE_PADDING if cache.states else {})
        self._padding |= WINDOW_PADDING if self._has_windows else {}
        self._decode_inputs = Inputs(len(self._padding), MAX_SEQUENCES, cache.device)
        self._prompt_inputs = Inputs(len(self._padding), self._rows[-1] + MAX_SEQUENCES, cache.device)
        num_groups = 2 if self._has_windows else 1
        self._staged_tables = torch.zeros(num_groups, MAX_SEQUENCES, self._width, dtype=torch.int32, pin_memory=True)
        self._tables = self._staged_tables.to(cache.device)
        self._copied = torch.cuda.Event()  # the last copy has read the staged memory

    def run(self, batch: Batch) -> Decoded | None:
        """Compute a step; None where it is of no shape that is captured."""
        shape = self._shape(batch)
        if shape is None:
            return None
        self._stage(batch, shape)
        found = self._graphs.get(shape)
        if found is None:
            if shape.is_decode:
                self._ops.refine(shape.rows, lambda: self._time_us(shape))
            found = self._graphs[shape] = self._capture(shape)
        found.graph.replay()
        left, count = found.left, len(batch.output_rows)
        logits, greedy = (None if one is None else one[:count] for one in (left.logits, left.greedy))
        confident = None if left.confident is None else left.confident.first(count)
        return Decoded(left.hidden[:count].clone(), logits, greedy, confident)

    def _shape(self, batch: Batch) -> StepShape | None:
        num_rows, num_sequences, width = len(batch.token_ids), len(batch.context_lens), batch.block_tables.shape[1]
        if batch.keep or not 0 < width <= self._width or not 0 < num_sequences <= MAX_SEQUENCES:
            return None
        if (self._cache.states and batch.states is None) or (self._has_windows and batch.window_tables is None):
            return None
        longest = int(batch.context_lens.max())
        if num_rows == num_sequences == len(batch.output_rows):
            rows = next(size for size in BUCKETS if num_rows <= size)
            return StepShape(rows, rows, 1, rows, self._ops.key_tiles_of(rows, longest))
        rows = next((size for size in self._rows if num_rows <= size), 0)
        outputs = next((size for size in self._outputs if len(batch.output_rows) <= size), 0)
        if not rows or not outputs or (rows > PROMPT_ROWS[-1] and num_rows < LEAST_FULL * rows):
            return None
        tile = self._ops.prompt_tile(rows, self._cache)
        tiles = rows // tile + (FEW_SEQUENCES if num_sequences <= FEW_SEQUENCES else MAX_SEQUENCES)
        return StepShape(rows, outputs, tile, tiles, self._ops.key_tiles_of(tiles, longest))

    def _stage(self, batch: Batch, shape: StepShape) -> None:
        """Write the batch to pinned memory and begin its copy."""
        self._copied.synchronize()
        lengths = np.diff(batch.row_starts).astype(np.int64)
        sequences, first = cut_rows(lengths, shape.tile)
        arrays = {
            "token": batch.token_ids,
            "position": batch.positions,
            "slot": token_slots(batch, self._cache.block_size),
            "context": batch.context_lens,
            "shift": np.zeros(1, np.int32) if batch.slot_shifts is None else batch.slot_shifts,
            "sequence": sequences,
            "first": batch.row_starts[sequences] + first,
            "count": np.minimum(lengths[sequences] - first, shape.tile),
            "output": batch.output_rows,
            **(state_arrays(batch) if self._cache.states else {}),
            **({"window_slot": token_slots(of_windows(batch), self._cache.block_size)} if self._has_windows else {}),
        }
        inputs = self._inputs(shape)
        for row, (name, nothing) in zip(inputs.staged.numpy(), self._padding.items(), strict=True):
            row[: len(arrays[name])] = arrays[name]
            row[len(arrays[name]) :] = nothing
        inputs.on_device.copy_(inputs.staged, non_blocking=True)
        groups = (batch.block_tables, batch.window_tables) if self._has_windows else (batch.block_tables,)
        for staged, moved, table in zip(self._staged_tables, self._tables, groups, strict=True):
            assert table is not None, "steps without the tables of windows are not captured"
            tables: Int32 = staged.numpy()
            count, width = table.shape
            tables[:count, :width] = np.maximum(table, 0)
            moved[:count].copy_(staged[:count], non_blocking=True)
        self._copied.record()

    def _inputs(self, shape: StepShape) -> Inputs:
        return self._decode_inputs if shape.is_decode else self._prompt_inputs

    def _capture(self, shape: StepShape) -> Captured:
        step = self._step(shape)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and chooses matmuls; the step itself writes the same again
            self._forward(step, shape)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            left = self._forward(step, shape)
        self._pool = graph.pool()
        return Captured(graph, left)

    def _time_us(self, shape: StepShape) -> float:
        """Of the staged step with the kernels that are picked now; the least of a few replays."""
        graph = self._capture(shape).graph
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        marks[-1].synchronize()
        return 1e3 * min(float(begin.elapsed_time(end)) for begin, end in itertools.pairwise(marks))

    def _step(self, shape: StepShape) -> Step:
        at = dict(zip(self._padding, self._inputs(shape).on_device, strict=True))
        sequences, first, counts = (at[name][: shape.tiles] for name in ("sequence", "first", "count"))
        tiles = PagedTiles(
            self._tables[0], at["context"], at["shift"], sequences, first, counts,
            num_key_tiles=shape.key_tiles, tile=shape.tile, is_decode=shape.is_decode,
        )  # fmt: skip
        tokens, positions, slots = (at[name][: shape.rows] for name in ("token", "position", "slot"))
        outputs = None if shape.is_decode else at["output"][: shape.outputs]
        empty = np.empty(0, np.int32)
        nothing = Batch(empty, empty, empty, empty, empty, empty)
        counts = {name: shape.rows if name in STATE_ROWS else shape.sequences for name in STATE_PADDING}
        held = {name: at[name][:count] for name, count in counts.items()} if self._cache.states else None
        states = None if held is None else StateRows(**held)
        step = Step(nothing, shape.rows, tokens, positions, slots, outputs, tiles, states)
        if not self._has_windows:
            return step
        own = replace(step, slots=at["window_slot"][: shape.rows], tiles=replace(tiles, tables=self._tables[1]))
        return replace(step, windowed=own)

    def _forward(self, step: Step, shape: StepShape) -> Decoded:
        model = self._model
        x = model.embed(replace(step, token_ids=fed_tokens(step.token_ids, self._chosen)))
        for index in range(len(model.weights.blocks)):
            x = model.run_block(x, index, step, self._cache)
        hidden = model.finish(x, step)
        if model.weights.head is None or len(hidden) != shape.outputs:
            return Decoded(hidden, None, None)
        if isinstance(self._generation, MaskedDiffusion):  # each graph would keep logits of many rows: none are left
            best_of, mask_id = self._ops.most_confident, self._generation.mask_id
            confident = confident_rows(lambda some: model.logits(hidden[some]), len(hidden), best_of, mask_id)
            return Decoded(hidden, None, None, confident)
        logits = model.logits(hidden)
        return Decoded(hidden, logits, most_probable(logits))


def prompt_rows(max_rows: int) -> tuple[int, ...]:
    """Rows of the steps with prompts that are captured, for an engine whose steps have at most so many."""
    full = -(-max_rows // MULTIPLE) * MULTIPLE
    return (*PROMPT_ROWS, full) if PROMPT_ROWS[-1] < full <= MAX_ROWS else PROMPT_ROWS
