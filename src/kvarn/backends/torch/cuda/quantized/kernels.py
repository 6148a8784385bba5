"""Triton kernels over packed matrices (pack.py): their product with rows, and their values.

The sums of a product are chains over PIECE values each, ascending and from zero, that are added from left to right:
the same bits whatever the tile, the number of rows, and whether one program computes all pieces or several do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn.backends.torch.cuda.dependent import wait_for_inputs
from kvarn.backends.torch.cuda.quantized.unpack import unpack


@triton.jit
def _load(at, inside, IS_EVEN: tl.constexpr):
    return tl.load(at) if IS_EVEN else tl.load(at, mask=inside[:, None], other=0)


@triton.jit
def _finish(total, up_total, to, stored, out, EPILOGUE: tl.constexpr):
    """Store a product, or what the epilogue makes of it."""
    if EPILOGUE == 1:
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(to, mask=stored, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate / (1 + tl.exp(-gate)) * up_total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _add_parts(parts, is_row, num_parts, step):
    """Add what programs have left, from left to right; eight are loaded at a time, since loads take long."""
    total = tl.zeros(parts.shape, tl.float32)
    for p in range(0, num_parts, 8):
        at = parts + p * step
        a = tl.load(at, mask=is_row, other=0.0)
        b = tl.load(at + step, mask=is_row & (p + 1 < num_parts), other=0.0)
        c = tl.load(at + 2 * step, mask=is_row & (p + 2 < num_parts), other=0.0)
        d = tl.load(at + 3 * step, mask=is_row & (p + 3 < num_parts), other=0.0)
        e = tl.load(at + 4 * step, mask=is_row & (p + 4 < num_parts), other=0.0)
        f = tl.load(at + 5 * step, mask=is_row & (p + 5 < num_parts), other=0.0)
        g = tl.load(at + 6 * step, mask=is_row & (p + 6 < num_parts), other=0.0)
        h = tl.load(at + 7 * step, mask=is_row & (p + 7 < num_parts), other=0.0)
        total = total + a + b + c + d + e + f + g + h
    return total


@triton.jit
def _add_tile(
    piece, up_piece, x_at, low_at, high_at, scales_at, t, columns, unit, rows, depth, m, k, inside,
    BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr,
    PER_LOW: tl.constexpr, PER_HIGH: tl.constexpr, IS_EVEN: tl.constexpr, IS_WHOLE: tl.constexpr,
    EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Tile t of the weights times x, added to the sums of a piece; and the same of up's columns."""
    for S in tl.static_range(TILE // SEGMENT):
        s = t * (TILE // SEGMENT) + S
        if S % PER_LOW == 0:
            at = low_at + (t * (TILE // SEGMENT // PER_LOW) + S // PER_LOW) * unit
            low = _load(at, inside, IS_EVEN)
            up_low = _load(at + columns * SEGMENT, inside, IS_EVEN) if EPILOGUE == 2 else low
        if PER_HIGH == 1:
            high, up_high = low, up_low
        elif S % PER_HIGH == 0:
            at = high_at + (t * (TILE // SEGMENT // PER_HIGH) + S // PER_HIGH) * unit
            high = _load(at, inside, IS_EVEN)
            up_high = _load(at + columns * SEGMENT, inside, IS_EVEN) if EPILOGUE == 2 else high
        mask = (m < rows)[:, None] if IS_WHOLE else (m < rows)[:, None] & (s * SEGMENT + k < depth)[None, :]
        x_tile = tl.load(x_at + s * SEGMENT, mask=mask, other=0.0).T
        at = scales_at + s * (unit // GROUP)
        values = unpack(low, high, _load(at, inside, IS_EVEN), S, BITS, ZERO)
        piece = tl.dot(values.to(x_tile.dtype), x_tile, piece)
        if EPILOGUE == 2:
            scale = _load(at + columns * (SEGMENT // GROUP), inside, IS_EVEN)
            up_piece = tl.dot(unpack(up_low, up_high, scale, S, BITS, ZERO).to(x_tile.dtype), x_tile, up_piece)
    return piece, up_piece


@triton.jit(do_not_specialize=["rows", "tiles", "run"])
def multiply_kernel(
    x, low, high, scales, out, parts, finished, rows, columns, all_columns, tiles, depth, run, x_row, out_row,
    BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr,
    PER_LOW: tl.constexpr, PER_HIGH: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, IS_EVEN: tl.constexpr, IS_WHOLE: tl.constexpr, IS_SPLIT: tl.constexpr,
    EPILOGUE: tl.constexpr, IS_LATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """IS_SPLIT: a program computes `run` pieces, and the last one to end adds all of them. IS_LATE: the kernel before
    does not write what this one reads, so it is waited for at the end."""
    TILES: tl.constexpr = PIECE // TILE
    tiles_m = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    m = tile % tiles_m * ROWS + tl.arange(0, ROWS)
    n = tile // tiles_m * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, SEGMENT)
    groups = tl.arange(0, SEGMENT // GROUP)
    inside = n < columns
    low_at = low + n.to(tl.int64)[:, None] * SEGMENT + k[None, :]
    high_at = high + n.to(tl.int64)[:, None] * SEGMENT + k[None, :]
    scales_at = scales + n.to(tl.int64)[:, None] * (SEGMENT // GROUP) + groups[None, :]
    x_at = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    first = tl.program_id(1) * run * TILES
    end = tl.minimum(tiles, first + run * TILES)
    if not IS_LATE:
        wait_for_inputs(DEPENDENT)
    unit = all_columns.to(tl.int64) * SEGMENT
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up_total = tl.zeros([COLUMNS, ROWS], tl.float32)
    piece = tl.zeros([COLUMNS, ROWS], tl.float32)
    up_piece = tl.zeros([COLUMNS, ROWS], tl.float32)
    step = tl.num_programs(0) * (ROWS * COLUMNS)
    place = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    parts_at = parts + tile * (ROWS * COLUMNS) + place
    is_row = (m < rows)[None, :]
    for t in tl.range(first, end, num_stages=STAGES):
        piece, up_piece = _add_tile(
            piece, up_piece, x_at, low_at, high_at, scales_at, t, columns, unit, rows, depth, m, k, inside,
            BITS, ZERO, GROUP, SEGMENT, TILE, PER_LOW, PER_HIGH, IS_EVEN, IS_WHOLE, EPILOGUE,
        )  # fmt: skip
        if (t + 1) % TILES == 0 or t + 1 == tiles:
            if IS_SPLIT:
                tl.store(parts_at + t // TILES * step, piece, mask=is_row)
            else:
                total += piece
            piece = tl.zeros([COLUMNS, ROWS], tl.float32)
            if EPILOGUE == 2:
                up_total += up_piece
                up_piece = tl.zeros([COLUMNS, ROWS], tl.float32)
    to = out + m.to(tl.int64)[None, :] * out_row + n[:, None]
    stored = is_row & inside[:, None]
    if IS_LATE:
        wait_for_inputs(DEPENDENT)
    if IS_SPLIT:
        tl.debug_barrier()
        if tl.atomic_add(finished + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            tl.store(finished + tile, 0)
            _finish(_add_parts(parts_at, is_row, tl.cdiv(tiles, TILES), step), up_total, to, stored, out, EPILOGUE)
    else:
        _finish(total, up_total, to, stored, out, EPILOGUE)


@triton.jit(do_not_specialize=["rows"])
def pieces_kernel(
    x, weight, out, rows, columns, x_row, weight_row, out_row,
    DEPTH: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, GROUPED: tl.constexpr, IS_EVEN: tl.constexpr, EPILOGUE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The same product with values that were written before; for many rows."""
    tiles_m = tl.cdiv(rows, ROWS)
    t = tl.program_id(0)
    per_group = GROUPED * tl.cdiv(columns, COLUMNS)
    first = t // per_group * GROUPED
    size = tl.minimum(tiles_m - first, GROUPED)
    m = (first + (t % per_group) % size) * ROWS + tl.arange(0, ROWS)
    n = ((t % per_group) // size) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP)
    x_at = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * weight_row + k[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    piece = tl.zeros([ROWS, COLUMNS], tl.float32)
    wait_for_inputs(DEPENDENT)
    for at in tl.range(0, DEPTH, STEP, num_stages=STAGES):
        if IS_EVEN:
            w_tile = tl.load(w_at + at)
            x_tile = tl.load(x_at + at, mask=(m < rows)[:, None], other=0.0)
        else:
            w_tile = tl.load(w_at + at, mask=(n < columns)[:, None] & (at + k < DEPTH)[None, :], other=0.0)
            x_tile = tl.load(x_at + at, mask=(m < rows)[:, None] & (at + k < DEPTH)[None, :], other=0.0)
        piece = tl.dot(x_tile, w_tile.T, piece)
        if (at + STEP) % PIECE == 0 or at + STEP >= DEPTH:
            total += piece
            piece = tl.zeros([ROWS, COLUMNS], tl.float32)
    to = out + m.to(tl.int64)[:, None] * out_row + n[None, :]
    stored = (m < rows)[:, None] & (n < columns)[None, :]
    _finish(total, total, to, stored, out, EPILOGUE)


@triton.jit(do_not_specialize=["count", "first"])
def values_kernel(
    ids, low, high, scales, out, count, first, all_columns, depth, out_row,
    BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr,
    PER_LOW: tl.constexpr, PER_HIGH: tl.constexpr, COLUMNS: tl.constexpr, HAS_IDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The values of `count` columns, those of ids or those from `first` on: one tile of some of them."""
    to = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.program_id(1)
    k = tl.arange(0, SEGMENT)
    groups = tl.arange(0, SEGMENT // GROUP)
    inside = to < count
    wait_for_inputs(DEPENDENT)
    n = (tl.load(ids + to, mask=inside, other=0) if HAS_IDS else first + to).to(tl.int64)
    words = n[:, None] * SEGMENT + k[None, :]
    unit = all_columns.to(tl.int64) * SEGMENT
    for S in tl.static_range(TILE // SEGMENT):
        if S % PER_LOW == 0:
            low_tile = _load(low + (t * (TILE // SEGMENT // PER_LOW) + S // PER_LOW) * unit + words, inside, False)
        if PER_HIGH > 1 and S % PER_HIGH == 0:
            high_tile = _load(high + (t * (TILE // SEGMENT // PER_HIGH) + S // PER_HIGH) * unit + words, inside, False)
        s = t * (TILE // SEGMENT) + S
        scale_at = scales + s * (unit // GROUP) + n[:, None] * (SEGMENT // GROUP) + groups[None, :]
        scale = _load(scale_at, inside, False)
        values = unpack(low_tile, high_tile if PER_HIGH > 1 else low_tile, scale, S, BITS, ZERO)
        at = s * SEGMENT + k
        tl.store(
            out + to.to(tl.int64)[:, None] * out_row + at[None, :], values.to(out.dtype.element_ty),
            mask=inside[:, None] & (at < depth)[None, :],
        )  # fmt: skip
