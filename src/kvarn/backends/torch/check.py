"""Refuses batches whose arrays do not fit together: an index out of range would cost a GPU the whole process."""

from __future__ import annotations

import numpy as np

from kvarn.backends.batch import Batch, Canvases, Int32, Keep, StateSlots, chosen_token
from kvarn.backends.torch.cache import DeviceCache
from kvarn.models.recurrent import attentions
from kvarn.models.spec import ModelSpec


def check_batch(batch: Batch, spec: ModelSpec, cache: DeviceCache, num_chosen: int = 0) -> None:
    """Raise ValueError for a batch the backend would read or write out of bounds with.

    num_chosen: rows of the last sample_later(), whose tokens it may name.
    """
    num_rows, num_sequences = len(batch.token_ids), len(batch.context_lens)
    starts = batch.row_starts
    fits = len(starts) == num_sequences + 1 and len(batch.positions) == num_rows
    fits = fits and starts[0] == 0 and starts[-1] == num_rows and bool((np.diff(starts) >= 0).all())
    _require(fits and len(batch.block_tables) == num_sequences, "rows, row_starts and sequences do not fit together")
    limit = spec.vocab_size * spec.embedding.segments
    is_known = _within(batch.token_ids, limit, least=chosen_token(num_chosen - 1))
    _require(is_known, f"token ids must be 0 .. {limit - 1}, or one of {num_chosen} chosen ones")
    _require(_within(batch.output_rows, num_rows), f"output_rows must be 0 .. {num_rows - 1}")
    is_inside = np.ones(num_rows, bool)
    is_inside[starts[:-1][starts[:-1] < num_rows]] = False
    steps = np.diff(batch.positions, prepend=0)
    is_consecutive = bool((batch.positions >= 0).all()) and bool((steps[is_inside] == 1).all())
    _require(is_consecutive, "positions must be consecutive")
    if spec.embedding.positions is not None:
        limit = spec.embedding.positions
        _require(_within(batch.positions, limit), f"positions must be 0 .. {limit - 1}")
    if batch.canvases is not None:
        _check_canvases(batch, batch.canvases, spec.width)
    for keep in batch.keep:
        _check_keep(batch, keep, cache)
    if batch.block_tables.shape[1]:
        _check_tables(batch, cache)
        if any(cache.windowed):
            _check_windows(batch, spec, cache)
    if batch.states is not None and cache.states:
        _check_states(batch, batch.states, len(cache.states[0]))


def _check_canvases(batch: Batch, canvases: Canvases, width: int) -> None:
    count = len(batch.context_lens)
    _require(len(canvases.starts) == len(canvases.feedback) == count, "canvases and sequences do not fit together")
    num_rows = np.clip(batch.positions[batch.row_starts[1:] - 1] + 1 - canvases.starts, 0, np.diff(batch.row_starts))
    for one, rows in zip(canvases.feedback, num_rows.tolist(), strict=True):
        _require(one is None or tuple(one.shape) == (rows, width), "what is fed back does not fit its canvas")


def _check_tables(batch: Batch, cache: DeviceCache) -> None:
    shifts = np.zeros(len(batch.context_lens), np.int32) if batch.slot_shifts is None else batch.slot_shifts
    _require(len(shifts) == len(batch.context_lens), "slot_shifts and sequences do not fit together")
    num_blocks = -(-batch.context_lens // cache.block_size)
    width = batch.block_tables.shape[1]
    _require(bool((num_blocks <= width).all()), f"a context is longer than its block table of {width}")
    used = batch.block_tables[np.arange(width) < num_blocks[:, None]]
    _require(_within(used, cache.num_blocks), "a block lies outside the cache")
    has_rows = np.diff(batch.row_starts) > 0
    first, last = batch.row_starts[:-1][has_rows], batch.row_starts[1:][has_rows] - 1
    low, high = (batch.positions[rows] - shifts[has_rows] for rows in (first, last))
    covers = bool((low >= 0).all()) and bool((high < batch.context_lens[has_rows]).all())
    _require(covers, "context_lens must cover every token of the step")


def _check_windows(batch: Batch, spec: ModelSpec, cache: DeviceCache) -> None:
    """From the block on in which the first row's window begins."""
    tables, size = batch.window_tables, cache.block_size
    _require(
        tables is not None and tables.shape == batch.block_tables.shape, "the cache has windows, the batch has not"
    )
    assert tables is not None, "refused above"
    widest = max(one.window or 0 for one in attentions(spec))
    shifts = np.zeros(len(batch.context_lens), np.int32) if batch.slot_shifts is None else batch.slot_shifts
    has_rows = np.diff(batch.row_starts) > 0
    first = batch.positions[batch.row_starts[:-1][has_rows]] - shifts[has_rows]
    begin, end = np.maximum(first + 1 - widest, 0) // size, -(-batch.context_lens[has_rows] // size)
    columns = np.arange(tables.shape[1])
    used = tables[has_rows][(columns >= begin[:, None]) & (columns < end[:, None])]
    _require(_within(used, cache.num_window_blocks), "a block of a window lies outside the cache")


def _check_states(batch: Batch, states: StateSlots, num_slots: int) -> None:
    count = len(batch.context_lens)
    fits = len(states.read) == len(states.written) == count and len(states.saved_rows) == len(states.saved_slots)
    _require(fits, "states and sequences do not fit together")
    _require(_within(states.saved_rows, len(batch.token_ids)), "a state is saved behind a row that is not there")
    written = np.concatenate([states.written, states.saved_slots])
    is_inside = _within(states.read, num_slots, least=-1) and _within(written, num_slots)
    _require(is_inside, f"slots of states must be 0 .. {num_slots - 1}")


def _check_keep(batch: Batch, keep: Keep, cache: DeviceCache) -> None:
    _require(0 <= keep.sequence < len(batch.context_lens), f"keep names sequence {keep.sequence}")
    _require(batch.block_tables.shape[1] > 0, "only what is cached can be kept")
    is_shifted = batch.slot_shifts is not None and bool(batch.slot_shifts[keep.sequence])
    _require(not is_shifted, "keep and slot_shifts exclude each other")
    first, end = batch.row_starts[keep.sequence : keep.sequence + 2]
    positions, context = batch.positions[first:end], int(batch.context_lens[keep.sequence])
    computed = int(((positions >= keep.block_start) & (positions < keep.block_end)).sum())
    length = keep.block_end - keep.block_start
    _require(0 < length == computed, "the kept block must be computed in the same step")
    _require(0 <= keep.num_kept <= context - length, f"{keep.num_kept} are more than the keys outside the block")
    _require(keep.pool_kernel > 0 and keep.pool_kernel % 2 == 1, f"pool_kernel is {keep.pool_kernel}, not odd")
    num_blocks = -(-keep.num_kept // cache.block_size)
    _require(num_blocks <= len(keep.table), "the table of the kept keys is shorter than they are")
    _require(_within(keep.table, cache.num_blocks), "a block of the kept keys lies outside the cache")
    own = batch.block_tables[keep.sequence, : -(-context // cache.block_size)]
    _require(not np.isin(keep.table[:num_blocks], own).any(), "a block of the kept keys is one of the sequence itself")


def _within(values: Int32, limit: int, least: int = 0) -> bool:
    return not len(values) or (int(values.min()) >= least and int(values.max()) < limit)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"{message}; the batch was made wrongly")
