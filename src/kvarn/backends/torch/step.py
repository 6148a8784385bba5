"""One step's Batch on the device: rows padded to whole tiles, where each token's K and V go, and which tiles of queries
meet which pieces of keys.

Pieces are PIECE keys by absolute slot and tiles TILE queries of one sequence, whatever else is in the batch: every row
is computed by operations of the same shape, alone or in company.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.batch import Batch
from kvarn.backends.torch.denoising.canvas import CanvasRows
from kvarn.backends.torch.device import on_device
from kvarn.backends.torch.mixers.recurrent import StateRows, make_state_rows
from kvarn.models.spec import Attention

ROWS = 16  # a multiple of this many rows is computed
TILE = 16  # queries of one sequence
PIECE = 256  # keys

Int64 = npt.NDArray[np.int64]
MaskKind = tuple[str, int | None, int | None, bool]


@dataclass(frozen=True, slots=True)
class Piece:
    """The PIECE keys from one slot on, of all tiles that reach them."""

    tiles: Tensor  # (n)
    keys: Tensor  # (n, PIECE) rows of the flat cache, or of the batch where nothing is cached
    key_positions: Tensor  # (n, PIECE)
    is_written: Tensor  # (n, PIECE) there is such a key
    masks: dict[MaskKind, Tensor]

    def visible(self, attention: Attention, tiles: Tiles) -> Tensor:
        """Which keys each query sees, (n, TILE, PIECE); made once for all layers of one kind."""
        kind: MaskKind = (attention.mask, attention.mask_block, attention.window, attention.is_chunked)
        if kind not in self.masks:
            queries = tiles.positions[self.tiles][:, :, None]
            if attention.mask == "canvas" and tiles.canvas_starts is not None:
                self.masks[kind] = self._canvas_mask(attention, queries, tiles.canvas_starts[self.tiles][:, None, None])
            else:
                self.masks[kind] = self._mask(attention, queries)
        return self.masks[kind]

    def _canvas_mask(self, attention: Attention, queries: Tensor, starts: Tensor) -> Tensor:
        keys, seen = self.key_positions[:, None, :], self.is_written[:, None, :]
        seen = seen & ((keys <= queries) | (queries >= starts))
        if attention.window is not None:
            seen = seen & (keys > torch.minimum(queries, starts) - attention.window)
        return seen.expand(-1, TILE, -1)

    def _mask(self, attention: Attention, queries: Tensor) -> Tensor:
        keys, seen = self.key_positions[:, None, :], self.is_written[:, None, :]
        if attention.mask == "block_causal":
            assert attention.mask_block is not None, "a block_causal mask has blocks"
            seen = seen & (keys < (queries // attention.mask_block + 1) * attention.mask_block)
        elif attention.mask in ("causal", "canvas"):
            seen = seen & (keys <= queries)
        if attention.window is not None:
            reach = queries % attention.window if attention.is_chunked else attention.window - 1
            seen = seen & (keys >= queries - reach) & (keys < queries + attention.window)
        return seen.expand(-1, TILE, -1)


@dataclass(frozen=True, slots=True)
class Tiles:
    """All queries of a batch, TILE of one sequence together; padding repeats row 0 and is written nowhere."""

    rows: Tensor  # (tiles, TILE) rows of the batch
    positions: Tensor  # (tiles, TILE)
    place: Tensor  # (rows of the batch) where each row lies among tiles x TILE
    pieces: tuple[Piece, ...]
    canvas_starts: Tensor | None = None  # (tiles)


@dataclass(frozen=True, slots=True)
class PagedTiles:
    """The same for kernels that read the block tables themselves; int32. A tile without queries is padding."""

    tables: Tensor  # (sequences, widest)
    contexts: Tensor  # (sequences)
    shifts: Tensor  # (sequences)
    sequences: Tensor  # (tiles)
    first_rows: Tensor  # (tiles)
    counts: Tensor  # (tiles) queries
    num_key_tiles: int  # that are computed side by side, of the longest context at least; 1: one after the other
    tile: int  # queries of a full one
    is_decode: bool = False  # tile i is the one query of sequence i, which is row i; padding has no context


@dataclass(frozen=True, slots=True)
class Step:
    """What a forward pass reads. num_rows counts the batch's own rows, the tensors have more: whole tiles."""

    batch: Batch
    num_rows: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor | None  # of the flat cache, -1 for padding; None: nothing is cached
    output_rows: Tensor | None  # None: all
    tiles: Tiles | PagedTiles
    states: StateRows | None = None  # None: nothing is kept of recurrent layers
    canvas: CanvasRows | None = None  # None: no row is one of a canvas
    windowed: Step | None = None  # the same with the slots and tables of the layers that keep a window

    def of_layer(self, is_windowed: bool) -> Step:
        """What a layer of either group reads."""
        if not is_windowed:
            return self
        assert self.windowed is not None, "the cache has windows, the step has not"
        return self.windowed


def make_step(batch: Batch, block_size: int, multiple: int, tiles: Tiles | PagedTiles) -> Step:
    """Bring a batch to the device of its tiles; the rows become a multiple."""
    num_rows, device = len(batch.token_ids), tiles.positions.device if isinstance(tiles, Tiles) else tiles.tables.device
    padding = -num_rows % multiple

    def padded(values: npt.NDArray[np.integer], value: int = 0) -> Tensor:
        wide = np.pad(values.astype(np.int64), (0, padding), constant_values=value)
        return on_device(wide, device)

    return Step(
        batch,
        num_rows,
        token_ids=padded(batch.token_ids),
        positions=padded(batch.positions),
        slots=padded(token_slots(batch, block_size), -1) if batch.block_tables.shape[1] else None,
        output_rows=on_device(batch.output_rows.astype(np.int64), device),
        tiles=tiles,
        states=None if batch.states is None else make_state_rows(batch, num_rows + padding, device),
    )


def of_windows(batch: Batch) -> Batch:
    """The batch as the layers that keep a window see it."""
    assert batch.window_tables is not None, "the cache has windows, the batch has no window_tables"
    return replace(batch, block_tables=batch.window_tables, window_tables=None)


def with_windows(step: Step, batch: Batch, block_size: int, tiles: Tiles | PagedTiles) -> Step:
    """Add what layers that keep a window read; tiles are those of of_windows(batch)."""
    slots = np.pad(token_slots(batch, block_size), (0, len(step.token_ids) - step.num_rows), constant_values=-1)
    return replace(step, windowed=replace(step, slots=on_device(slots, step.token_ids.device), tiles=tiles))


def with_chosen(step: Step, chosen: Tensor) -> Step:
    """The step with the tokens that the last one chose in the places that name them; see batch.chosen_token."""
    ids = step.token_ids
    fed = chosen[(-1 - ids).clamp(min=0)].to(ids.dtype).clamp(min=0)  # an id to compute with, also for NO_TOKEN
    return replace(step, token_ids=torch.where(ids < 0, fed, ids))


def sequence_of_rows(batch: Batch) -> Int64:
    """The sequence of each row."""
    lengths = np.diff(batch.row_starts)
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)


def make_tiles(batch: Batch, block_size: int, device: torch.device) -> Tiles:
    """Cut every sequence's queries into tiles."""
    lengths = np.diff(batch.row_starts).astype(np.int64)
    sequences, first = cut_rows(lengths, TILE)
    offsets = first[:, None] + np.arange(TILE)
    rows = np.where(offsets < lengths[sequences, None], batch.row_starts[sequences, None] + offsets, -1)
    place = np.empty(len(batch.token_ids), np.int64)
    place[rows[rows >= 0]] = np.flatnonzero(rows.reshape(-1) >= 0)
    rows = np.maximum(rows, 0)
    positions = on_device(batch.positions.astype(np.int64)[rows], device)
    pieces = _make_pieces(batch, block_size, sequences, device)
    canvases = batch.canvases
    starts = None if canvases is None else on_device(canvases.starts.astype(np.int64)[sequences], device)
    return Tiles(on_device(rows, device), positions, on_device(place, device), pieces, starts)


def make_paged_tiles(batch: Batch, tile: int, num_key_tiles: int, device: torch.device) -> PagedTiles:
    """Cut every sequence's queries into tiles of that many, those with the most keys first."""
    lengths = np.diff(batch.row_starts).astype(np.int64)
    sequences, first = cut_rows(lengths, tile)
    order = np.argsort(-(batch.context_lens[sequences] - lengths[sequences] + first), kind="stable")
    sequences, first = sequences[order], first[order]
    shifts = np.zeros(len(lengths)) if batch.slot_shifts is None else batch.slot_shifts
    counts = np.minimum(lengths[sequences] - first, tile)
    rows = batch.row_starts[sequences] + first

    def moved(values: npt.NDArray[Any]) -> Tensor:
        return on_device(np.ascontiguousarray(values, np.int32), device)

    return PagedTiles(
        tables=moved(np.maximum(batch.block_tables, 0)),  # what is freed is not seen
        contexts=moved(batch.context_lens),
        shifts=moved(shifts),
        sequences=moved(sequences),
        first_rows=moved(rows),
        counts=moved(counts),
        num_key_tiles=num_key_tiles,
        tile=tile,
    )


def cut_rows(lengths: Int64, tile: int) -> tuple[Int64, Int64]:
    """The sequence of each tile, and its first query within the sequence."""
    counts = -(-lengths // tile)
    sequences = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    first = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    return sequences, first * tile


def _make_pieces(batch: Batch, block_size: int, sequences: Int64, device: torch.device) -> tuple[Piece, ...]:
    contexts = batch.context_lens.astype(np.int64)
    longest = int(contexts.max(initial=0))
    found = []
    for first in range(0, longest, PIECE):
        tiles = np.flatnonzero(contexts[sequences] > first)
        owners = sequences[tiles]
        slots = np.arange(first, first + PIECE)[None, :]
        rows = _key_rows(batch, block_size, owners, slots)
        is_written = (slots < contexts[owners, None]) & (rows >= 0)  # negative: freed, in front of a window
        shifts = 0 if batch.slot_shifts is None else batch.slot_shifts.astype(np.int64)[owners, None]
        keys = np.where(is_written, rows, 0)
        positions = np.broadcast_to(slots + shifts, keys.shape)
        has_keys = is_written.any(axis=1)  # a piece without any would add exactly nothing
        if not has_keys.any():
            continue
        parts = (part[has_keys] for part in (tiles, keys, positions, is_written))
        moved = [on_device(part, device) for part in parts]
        found.append(Piece(moved[0], moved[1], moved[2], moved[3], {}))
    return tuple(found)


def _key_rows(batch: Batch, block_size: int, owners: Int64, slots: Int64) -> Int64:
    if batch.block_tables.shape[1] == 0:
        rows: Int64 = batch.row_starts.astype(np.int64)[owners, None] + slots
        return rows
    columns = np.minimum(slots // block_size, batch.block_tables.shape[1] - 1)
    blocks: Int64 = batch.block_tables.astype(np.int64)[owners[:, None], columns]
    return blocks * block_size + slots % block_size


def token_slots(batch: Batch, block_size: int) -> Int64:
    """The row of the flat cache for each row of the batch; negative in a block that was freed."""
    sequences, slots = sequence_of_rows(batch), batch.positions.astype(np.int64)
    if batch.slot_shifts is not None:
        slots = slots - batch.slot_shifts[sequences]
    blocks = batch.block_tables.astype(np.int64)[sequences, slots // block_size]
    return blocks * block_size + slots % block_size
