"""The attention kernel: a program takes some queries of one sequence with all query heads of one KV head.

Masks: 0 causal, 1 causal by blocks, 2 bidirectional; windows on top. See attention.py for the arithmetic that is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn.backends.torch.cuda.dependent import wait_for_inputs

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
        if MASK == 2:
            hi = tl.minimum(last + WINDOW - shift, context)
    return lo, tl.maximum(whole, lo), hi


@triton.jit
def _merge(sums, weights, top, sums2, weights2, top2):
    """Add a tile to the tiles before it; explicit fused multiply-adds, so that every caller is rounded alike."""
    best = tl.maximum(top, top2)
    safe = tl.where(best == float("-inf"), 0.0, best)
    old = tl.exp2(top - safe)
    new = tl.exp2(top2 - safe)
    sums = tl.fma(sums2, tl.broadcast_to(new[:, None], sums2.shape), sums * old[:, None])
    return sums, tl.fma(weights2, new, weights * old), best


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
        seen = seen & (keys[None, :] < queries[:, None] + WINDOW)
    return seen


@triton.jit
def _load_tile(base, at, inside, dtype, IS_WHOLE: tl.constexpr):
    """Keys or values of a tile; what is not inside is 0."""
    if IS_WHOLE:
        return tl.load(base + at).to(dtype)
    return tl.load(base + at, mask=inside, other=0.0).to(dtype)


@triton.jit
def _attend_tile(
    q, k, v, table, n, hi, positions, shift, scale, cap,
    PER_BLOCK: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr, MASK_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of values, of weights and the largest score of the slots n .. n + TILE - 1, those from hi on nobody's."""
    ROWS: tl.constexpr = q.shape[0]
    DIM_PAD: tl.constexpr = q.shape[1]
    offsets = tl.arange(0, TILE)
    d = tl.arange(0, DIM_PAD)
    slots = n + offsets
    is_there = slots < hi
    IS_PADDED: tl.constexpr = DIM != DIM_PAD
    IN_BLOCK: tl.constexpr = BLOCK % TILE == 0  # one block holds the tile, whatever of it is written
    if IN_BLOCK:
        start = tl.load(table + n // BLOCK).to(tl.int64) * PER_BLOCK
        k += start
        v += start
        at = (n % BLOCK + offsets)[:, None] * DIM + d[None, :]
    else:
        blocks = tl.load(table + slots // BLOCK, mask=is_there, other=0).to(tl.int64)
        at = (blocks * PER_BLOCK + slots % BLOCK * DIM)[:, None] + d[None, :]
    inside = is_there[:, None] & (d < DIM)[None, :]
    keys = _load_tile(k, at, inside, q.dtype, not IS_PADDED and (IN_BLOCK or not MASKED))
    values = _load_tile(v, at, inside, q.dtype, not IS_PADDED and not MASKED)  # 0 times what is no number is none
    scores = tl.dot(q, keys.T, input_precision=PRECISION)
    if HAS_CAP:
        scores = cap * (1 - 2 / (tl.exp(scores * (2 * scale / cap)) + 1))
        scale = LOG2_E
    if MASKED:
        seen = _visible(slots + shift, positions, MASK, MASK_BLOCK, WINDOW) & is_there[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    # Explicit fmas: the compiler would fuse other products with sums in one kernel than in another.
    top = tl.fma(tl.max(scores, 1), tl.full([ROWS], 1.0, tl.float32) * scale, tl.zeros([ROWS], tl.float32))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(scores, tl.full([ROWS, TILE], 1.0, tl.float32) * scale, -safe[:, None])).to(values.dtype)
    ones = tl.full([TILE, 16], 1.0, values.dtype)
    weights = tl.max(tl.dot(p, ones, input_precision=PRECISION), 1)
    return tl.dot(p, values, input_precision=PRECISION), weights, top


@triton.jit
def _attend_tiles(
    begin, end, sums, weights, top, q, k, v, table, hi, positions, shift, scale, cap,
    PER_BLOCK: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr, MASK_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge the tiles from begin on, left to right."""
    for n in tl.range(begin, end, TILE, num_stages=STAGES):
        sums2, weights2, top2 = _attend_tile(
            q, k, v, table, n, hi, positions, shift, scale, cap,
            PER_BLOCK, DIM, MASK, MASK_BLOCK, WINDOW, HAS_CAP, BLOCK, TILE, MASKED, PRECISION,
        )  # fmt: skip
        sums, weights, top = _merge(sums, weights, top, sums2, weights2, top2)
    return sums, weights, top


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
def _load_queries(
    q, row0, count, head, q_row, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, DIM_PAD: tl.constexpr
):
    """(rows, DIM): token after token, each with the heads of its group; what is not there is 0."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    places = (row0 + r // GROUP).to(tl.int64)[:, None] * q_row + (head * GROUP + r % GROUP)[:, None] * DIM + d[None, :]
    return tl.load(q + places, mask=(r // GROUP < count)[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def _store_heads(
    out, sinks, sums, weights, top, row0, count, head,
    GROUP: tl.constexpr, DIM: tl.constexpr, OUT_ROW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Divide by the weights, a sink's among them, and write (rows, heads, DIM)."""
    r = tl.arange(0, sums.shape[0])
    d = tl.arange(0, sums.shape[1])
    if HAS_SINKS:
        zeros = tl.zeros([sums.shape[0]], tl.float32)
        sink = tl.fma(tl.load(sinks + head * GROUP + r % GROUP), zeros + LOG2_E, zeros)
        best = tl.maximum(top, sink)
        old = tl.exp2(top - best)
        sums = sums * old[:, None]
        weights = tl.fma(weights, old, tl.exp2(sink - best))
    places = (row0 + r // GROUP).to(tl.int64)[:, None] * OUT_ROW + (head * GROUP + r % GROUP)[:, None] * DIM
    inside = (r // GROUP < count)[:, None] & (d < DIM)[None, :]
    tl.store(out + places + d[None, :], (sums / weights[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _leave_part(sums, weights, top, part, part_sums, part_stats, finished, num_parts, HELD: tl.constexpr):
    """Write one tile of keys to the scratch memory; whether all the others are there already."""
    r = tl.arange(0, sums.shape[0])
    d = tl.arange(0, sums.shape[1])
    at = part.to(tl.int64) * HELD + r
    tl.store(part_sums + at[:, None] * sums.shape[1] + d[None, :], sums, mask=(r < HELD)[:, None])
    tl.store(part_stats + at * 2, top, mask=r < HELD)
    tl.store(part_stats + at * 2 + 1, weights, mask=r < HELD)
    tl.debug_barrier()
    is_last = tl.atomic_add(finished, 1, sem="acq_rel") == num_parts - 1
    if is_last:
        tl.store(finished, 0)
    return is_last


@triton.jit
def _merge_parts(
    first, end, part0, part_sums, part_stats, ROWS: tl.constexpr, DIM_PAD: tl.constexpr, HELD: tl.constexpr
):
    """Merge the tiles that other programs have left, of which HELD rows were written."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    is_held = r < HELD
    sums = tl.zeros([ROWS, DIM_PAD], tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for i in tl.range(first, end):
        part = (part0 + i).to(tl.int64) * HELD + r
        sums2 = tl.load(part_sums + part[:, None] * DIM_PAD + d[None, :], mask=is_held[:, None], other=0.0)
        top2 = tl.load(part_stats + part * 2, mask=is_held, other=0.0)
        weights2 = tl.load(part_stats + part * 2 + 1, mask=is_held, other=1.0)
        sums, weights, top = _merge(sums, weights, top, sums2, weights2, top2)
    return sums, weights, top


@triton.jit(do_not_specialize=["width", "most"])
def attend_kernel(
    q, out, k, v, sinks, q_row,
    tile_sequences, tile_rows, tile_counts, row_positions, contexts, shifts, tables, width, scale, cap,
    part_sums, part_stats, finished, most,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr,
    HELD: tl.constexpr, MASK: tl.constexpr, MASK_BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    IS_DECODE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one KV head; with SPLIT one tile of keys, and the last program to end merges them all."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PER_BLOCK: tl.constexpr = KV_HEADS * BLOCK * DIM
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    tile = tl.program_id(0)
    head = tl.program_id(1)
    wait_for_inputs(DEPENDENT)
    s, row0, count, context = _tile(tile, tile_sequences, tile_rows, tile_counts, contexts, IS_DECODE)
    if count == 0:
        return
    first = tl.load(row_positions + row0).to(tl.int32)
    shift = tl.load(shifts + s)
    lo, whole, hi = _bounds(first, first + count - 1, context, shift, MASK, MASK_BLOCK, WINDOW, TILE)
    n = lo
    if SPLIT:
        n = tl.program_id(2) * TILE
        if (n < lo) | (n >= hi):
            return
    queries = _load_queries(q, row0, count, head, q_row, GROUP, DIM, ROWS, DIM_PAD)
    positions = first + tl.arange(0, ROWS) // GROUP
    k += head * (BLOCK * DIM)
    v += head * (BLOCK * DIM)
    table = tables + s.to(tl.int64) * width
    if SPLIT:
        sums, weights, top = _attend_tile(
            queries, k, v, table, n, hi, positions, shift, scale, cap,
            PER_BLOCK, DIM, MASK, MASK_BLOCK, WINDOW, HAS_CAP, BLOCK, TILE, True, PRECISION,
        )  # fmt: skip
        begin = lo // TILE
        end = tl.cdiv(hi, TILE)
        counter = tile * KV_HEADS + head
        part = counter * most + n // TILE
        if _leave_part(sums, weights, top, part, part_sums, part_stats, finished + counter, end - begin, HELD):
            part0 = counter * most
            sums, weights, top = _merge_parts(begin, end, part0, part_sums, part_stats, ROWS, DIM_PAD, HELD)
            _store_heads(out, sinks, sums, weights, top, row0, count, head, GROUP, DIM, HEADS * DIM, HAS_SINKS)
    else:
        sums = tl.zeros([ROWS, DIM_PAD], tl.float32)
        weights = tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        middle = lo
        if not IS_DECODE:  # a single query has one tile that is not whole: not worth a loop of its own
            middle = tl.maximum(lo, tl.minimum(whole, hi) // TILE * TILE)
            sums, weights, top = _attend_tiles(
                lo, middle, sums, weights, top, queries, k, v, table, hi, positions, shift, scale, cap,
                PER_BLOCK, DIM, MASK, MASK_BLOCK, WINDOW, HAS_CAP, BLOCK, TILE, STAGES, False, PRECISION,
            )  # fmt: skip
        sums, weights, top = _attend_tiles(
            middle, hi, sums, weights, top, queries, k, v, table, hi, positions, shift, scale, cap,
            PER_BLOCK, DIM, MASK, MASK_BLOCK, WINDOW, HAS_CAP, BLOCK, TILE, STAGES, True, PRECISION,
        )  # fmt: skip
        _store_heads(out, sinks, sums, weights, top, row0, count, head, GROUP, DIM, HEADS * DIM, HAS_SINKS)
