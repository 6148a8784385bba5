"""The attention kernels: a program takes some queries of one sequence with all query heads of one KV head.

Masks: 0 causal, 1 causal by blocks, 2 bidirectional; windows on top. See attention.py for the arithmetic that is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bounds(
    first, last, context, shift, MASK: tl.constexpr, MASK_BLOCK: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr
):
    """Slots lo .. hi - 1 are seen by some query at positions first .. last, those before whole by all of them."""
    if MASK == 2:
        whole = context
        hi = context
    elif MASK == 1:
        whole = tl.minimum((first // MASK_BLOCK + 1) * MASK_BLOCK - shift, context)
        hi = tl.minimum((last // MASK_BLOCK + 1) * MASK_BLOCK - shift, context)
    else:
        whole = tl.minimum(first + 1 - shift, context)
        hi = tl.minimum(last + 1 - shift, context)
    lo = 0
    if WINDOW > 0:
        lo = tl.maximum(first - WINDOW + 1 - shift, 0) // TILE * TILE
        whole = lo
    return lo, tl.maximum(whole, lo), hi


@triton.jit
def _merge(sums, weights, top, sums2, weights2, top2):
    """Add a piece to the pieces before it."""
    best = tl.maximum(top, top2)
    safe = tl.where(best == float("-inf"), 0.0, best)
    old = tl.exp2(top - safe)
    new = tl.exp2(top2 - safe)
    return sums * old[:, None] + sums2 * new[:, None], weights * old + weights2 * new, best


@triton.jit
def _visible(keys, queries, MASK: tl.constexpr, MASK_BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys each query may see by their positions, (queries, keys)."""
    seen = (keys[None, :] >= 0) & (queries[:, None] >= 0)
    if MASK == 0:
        seen = seen & (keys[None, :] <= queries[:, None])
    if MASK == 1:
        seen = seen & (keys[None, :] < ((queries // MASK_BLOCK + 1) * MASK_BLOCK)[:, None])
    if WINDOW > 0:
        seen = seen & (keys[None, :] > queries[:, None] - WINDOW)
    return seen


@triton.jit
def _load_tile(base, at, inside, d, dtype, IS_WHOLE: tl.constexpr):
    """Keys or values of a tile; what is not inside is 0."""
    if IS_WHOLE:
        found = tl.load(base + at[:, None] + d[None, :])
    else:
        found = tl.load(base + at[:, None] + d[None, :], mask=inside, other=0.0)
    return found.to(dtype)


@triton.jit
def _add_tile(
    q, sums, weights, top, k, v, k_slot, table, n, hi, positions, shift, scale, cap,
    DIM: tl.constexpr, MASK: tl.constexpr, MASK_BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the slots n .. n + TILE - 1, of which those from hi on are nobody's."""
    ROWS: tl.constexpr = q.shape[0]
    DIM_PAD: tl.constexpr = q.shape[1]
    slots = n + tl.arange(0, TILE)
    d = tl.arange(0, DIM_PAD)
    is_there = slots < hi
    if MASKED:
        blocks = tl.load(table + slots // BLOCK, mask=is_there, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + slots // BLOCK).to(tl.int64)
    at = (blocks * BLOCK + slots % BLOCK) * k_slot
    inside = is_there[:, None] & (d < DIM)[None, :]
    IS_WHOLE: tl.constexpr = (not MASKED) and DIM == DIM_PAD
    keys = _load_tile(k, at, inside, d, q.dtype, IS_WHOLE)
    values = _load_tile(v, at, inside, d, q.dtype, IS_WHOLE)
    scores = tl.dot(q, keys.T, input_precision=PRECISION)
    if HAS_CAP:
        scores = cap * (1 - 2 / (tl.exp(scores * (2 * scale / cap)) + 1))
        scale = LOG2_E
    if MASKED:
        seen = _visible(slots + shift, positions, MASK, MASK_BLOCK, WINDOW) & is_there[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    best = tl.maximum(top, tl.max(scores, 1) * scale)
    safe = tl.where(best == float("-inf"), 0.0, best)
    # An explicit fma: left to the compiler, masked and unmasked tiles would be rounded differently.
    p = tl.exp2(tl.fma(scores, tl.full([ROWS, TILE], 1.0, tl.float32) * scale, -safe[:, None])).to(values.dtype)
    old = tl.exp2(top - safe)
    ones = tl.full([TILE, 16], 1.0, values.dtype)
    weights = weights * old + tl.max(tl.dot(p, ones, input_precision=PRECISION), 1)
    sums = tl.dot(p, values, sums * old[:, None], input_precision=PRECISION)
    return sums, weights, best


@triton.jit
def _add_tiles(
    begin, end, q, state, whole_state, k, v, k_slot, table, hi, positions, shift, scale, cap,
    DIM: tl.constexpr, MASK: tl.constexpr, MASK_BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PIECE_SLOTS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles from begin on; where a piece begins, the one before it is merged."""
    sums, weights, top = state
    all_sums, all_weights, all_top = whole_state
    for n in tl.range(begin, end, TILE, num_stages=STAGES):
        if not SPLIT:
            if n % PIECE_SLOTS == 0:
                all_sums, all_weights, all_top = _merge(all_sums, all_weights, all_top, sums, weights, top)
                sums = tl.zeros_like(sums)
                weights = tl.zeros_like(weights)
                top = tl.full(top.shape, float("-inf"), tl.float32)
        sums, weights, top = _add_tile(
            q, sums, weights, top, k, v, k_slot, table, n, hi, positions, shift, scale, cap,
            DIM, MASK, MASK_BLOCK, WINDOW, HAS_CAP, BLOCK, TILE, MASKED, PRECISION,
        )  # fmt: skip
    return (sums, weights, top), (all_sums, all_weights, all_top)


@triton.jit
def _nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums, weights and largest score before the first key."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32), top


@triton.jit
def _tile(tile, tile_sequences, tile_rows, tile_counts, contexts, IS_DECODE: tl.constexpr):
    """The sequence of a tile, its first row and number of queries, and the slots of the sequence.

    Where tiles, rows and sequences are the same, two loads less lie between a program's start and its first key.
    """
    if IS_DECODE:
        s = tile
        row0 = tile
        context = tl.load(contexts + s)
        count = tl.minimum(context, 1)
    else:
        s = tl.load(tile_sequences + tile)
        row0 = tl.load(tile_rows + tile)
        count = tl.load(tile_counts + tile)
        context = tl.load(contexts + s)
    return s, row0, count, context


@triton.jit
def _places(row0, head, stride, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr):
    """Where the program's queries lie in (rows, heads, DIM): token after token, each with the heads of its group."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    return (row0 + r // GROUP).to(tl.int64)[:, None] * stride + (head * GROUP + r % GROUP)[:, None] * DIM + d[None, :]


@triton.jit(do_not_specialize=["width", "most"])
def attend_kernel(
    q, out, k, v, k_slot, k_head, q_row,
    tile_sequences, tile_rows, tile_counts, row_positions, contexts, shifts, tables, width, scale, cap,
    part_sums, part_stats, most,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr,
    MASK: tl.constexpr, MASK_BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PIECE_SLOTS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one KV head; with SPLIT, one piece of it."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s, row0, count, context = _tile(tile, tile_sequences, tile_rows, tile_counts, contexts, IS_DECODE)
    if count == 0:
        return
    first = tl.load(row_positions + row0).to(tl.int32)
    shift = tl.load(shifts + s)
    last = first + count - 1
    lo, whole, hi = _bounds(first, last, context, shift, MASK, MASK_BLOCK, WINDOW, TILE)
    if SPLIT:
        lo = tl.maximum(lo, tl.program_id(2) * PIECE_SLOTS)
        hi = tl.minimum(hi, (tl.program_id(2) + 1) * PIECE_SLOTS)
        if lo >= hi:
            return
    middle = tl.maximum(lo, tl.minimum(whole, hi) // TILE * TILE)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    inside = (r // GROUP < count)[:, None] & (d < DIM)[None, :]
    places = _places(row0, head, q_row, GROUP, DIM, DIM_PAD, ROWS)
    queries = tl.load(q + places, mask=inside, other=0.0)
    positions = first + r // GROUP
    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * k_head
    table = tables + s.to(tl.int64) * width
    state = _nothing(ROWS, DIM_PAD)
    before = _nothing(ROWS, DIM_PAD)
    state, before = _add_tiles(
        lo, middle, queries, state, before, k, v, k_slot, table, hi, positions, shift, scale, cap,
        DIM, MASK, MASK_BLOCK, WINDOW, HAS_CAP, BLOCK, TILE, PIECE_SLOTS, STAGES, SPLIT, False, PRECISION,
    )  # fmt: skip
    state, before = _add_tiles(
        middle, hi, queries, state, before, k, v, k_slot, table, hi, positions, shift, scale, cap,
        DIM, MASK, MASK_BLOCK, WINDOW, HAS_CAP, BLOCK, TILE, PIECE_SLOTS, STAGES, SPLIT, True, PRECISION,
    )  # fmt: skip
    sums, weights, top = state
    if SPLIT:
        part = (((tile * KV_HEADS + head) * most + tl.program_id(2)).to(tl.int64) * ROWS) + r
        tl.store(part_sums + part[:, None] * DIM_PAD + d[None, :], sums)
        tl.store(part_stats + part * 2, top)
        tl.store(part_stats + part * 2 + 1, weights)
    else:
        sums, weights, top = _merge(before[0], before[1], before[2], sums, weights, top)
        tl.store(out + places, (sums / weights[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["most"])
def merge_kernel(
    out, out_row, tile_sequences, tile_rows, tile_counts, row_positions, contexts, shifts,
    part_sums, part_stats, most,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr,
    MASK: tl.constexpr, MASK_BLOCK: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, PIECE_SLOTS: tl.constexpr,
    IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of one tile and KV head, left to right."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s, row0, count, context = _tile(tile, tile_sequences, tile_rows, tile_counts, contexts, IS_DECODE)
    if count == 0:
        return
    first = tl.load(row_positions + row0).to(tl.int32)
    bounds = _bounds(first, first + count - 1, context, tl.load(shifts + s), MASK, MASK_BLOCK, WINDOW, TILE)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    sums, weights, top = _nothing(ROWS, DIM_PAD)
    for piece in range(bounds[0] // PIECE_SLOTS, tl.cdiv(bounds[2], PIECE_SLOTS)):
        part = (((tile * KV_HEADS + head) * most + piece).to(tl.int64) * ROWS) + r
        sums2 = tl.load(part_sums + part[:, None] * DIM_PAD + d[None, :])
        top2 = tl.load(part_stats + part * 2)
        weights2 = tl.load(part_stats + part * 2 + 1)
        sums, weights, top = _merge(sums, weights, top, sums2, weights2, top2)
    inside = (r // GROUP < count)[:, None] & (d < DIM)[None, :]
    places = _places(row0, head, out_row, GROUP, DIM, DIM_PAD, ROWS)
    tl.store(out + places, (sums / weights[:, None]).to(out.dtype.element_ty), mask=inside)
