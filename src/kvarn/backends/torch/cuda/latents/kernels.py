"""Kernels of latent attention: to queries of cached rows, attention with one KV head, whose values are its latents.

See attention_kernels.py, whose arithmetic this is, with scores that are two products one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn.backends.torch.cuda.attention_kernels import (
    _bounds,
    _leave_part,
    _load_queries,
    _merge,
    _merge_parts,
    _store_heads,
    _tile,
    _visible,
)
from kvarn.backends.torch.cuda.dependent import wait_for_inputs
from kvarn.backends.torch.cuda.rows import _cached


@triton.jit
def _attend_tile(
    q, q_rope, rows, table, n, hi, positions, shift, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of latents, of weights and the largest score of the slots n .. n + TILE - 1, those from hi on nobody's."""
    ROWS: tl.constexpr = q.shape[0]
    RANK_PAD: tl.constexpr = q.shape[1]
    ROPE_PAD: tl.constexpr = q_rope.shape[1]
    DIM: tl.constexpr = RANK + ROPE
    slots = n + tl.arange(0, TILE)
    d = tl.arange(0, RANK_PAD)
    e = tl.arange(0, ROPE_PAD)
    is_there = slots < hi
    if BLOCK % TILE == 0:  # one block holds the tile
        at = tl.load(table + n // BLOCK).to(tl.int64) * (BLOCK * DIM) + (n % BLOCK + tl.arange(0, TILE)) * DIM
    else:
        at = tl.load(table + slots // BLOCK, mask=is_there, other=0).to(tl.int64) * (BLOCK * DIM) + slots % BLOCK * DIM
    if MASKED or RANK != RANK_PAD:  # 0 times what is no number is none
        inside = is_there[:, None] & (d < RANK)[None, :]
        latents = tl.load(rows + at[:, None] + d[None, :], mask=inside, other=0.0).to(q.dtype)
    else:
        latents = tl.load(rows + at[:, None] + d[None, :]).to(q.dtype)
    inside = is_there[:, None] & (e < ROPE)[None, :]
    keys = tl.load(rows + at[:, None] + (RANK + e)[None, :], mask=inside, other=0.0).to(q.dtype)
    scores = tl.dot(q, latents.T, input_precision=PRECISION)
    scores = tl.dot(q_rope, keys.T, scores, input_precision=PRECISION)
    if MASKED:
        seen = _visible(slots + shift, positions, 0, 0, 0) & is_there[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.fma(tl.max(scores, 1), tl.full([ROWS], 1.0, tl.float32) * scale, tl.zeros([ROWS], tl.float32))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(scores, tl.full([ROWS, TILE], 1.0, tl.float32) * scale, -safe[:, None])).to(latents.dtype)
    ones = tl.full([TILE, 16], 1.0, latents.dtype)
    weights = tl.max(tl.dot(p, ones, input_precision=PRECISION), 1)
    return tl.dot(p, latents, input_precision=PRECISION), weights, top


@triton.jit
def _attend_tiles(
    begin, end, sums, weights, top, q, q_rope, rows, table, hi, positions, shift, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge the tiles from begin on, left to right."""
    for n in tl.range(begin, end, TILE, num_stages=STAGES):
        sums2, weights2, top2 = _attend_tile(
            q, q_rope, rows, table, n, hi, positions, shift, scale, RANK, ROPE, BLOCK, TILE, MASKED, PRECISION
        )
        sums, weights, top = _merge(sums, weights, top, sums2, weights2, top2)
    return sums, weights, top


@triton.jit(do_not_specialize=["width", "most"])
def attend_kernel(
    q, q_rope, out, rows, tile_sequences, tile_rows, tile_counts, row_positions, contexts, shifts, tables, width, scale,
    part_sums, part_stats, finished, most,
    HEADS: tl.constexpr, PER_PROGRAM: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, IS_DECODE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One tile of queries and some heads; with SPLIT one tile of keys, and the last program to end merges them all."""
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    tile = tl.program_id(0)
    group = tl.program_id(1)
    wait_for_inputs(DEPENDENT)
    s, row0, count, context = _tile(tile, tile_sequences, tile_rows, tile_counts, contexts, IS_DECODE)
    if count == 0:
        return
    first = tl.load(row_positions + row0).to(tl.int32)
    shift = tl.load(shifts + s)
    lo, whole, hi = _bounds(first, first + count - 1, context, shift, 0, 0, 0, TILE)
    n = lo
    if SPLIT:
        n = tl.program_id(2) * TILE
        if (n < lo) | (n >= hi):
            return
    queries = _load_queries(q, row0, count, group, HEADS * RANK, PER_PROGRAM, RANK, ROWS, RANK_PAD)
    rotated = _load_queries(q_rope, row0, count, group, HEADS * ROPE, PER_PROGRAM, ROPE, ROWS, ROPE_PAD)
    positions = first + tl.arange(0, ROWS) // PER_PROGRAM
    table = tables + s.to(tl.int64) * width
    if SPLIT:
        sums, weights, top = _attend_tile(
            queries, rotated, rows, table, n, hi, positions, shift, scale, RANK, ROPE, BLOCK, TILE, True, PRECISION
        )
        begin = lo // TILE
        end = tl.cdiv(hi, TILE)
        counter = tile * (HEADS // PER_PROGRAM) + group
        part0 = counter * most
        part = part0 + n // TILE
        if _leave_part(sums, weights, top, part, part_sums, part_stats, finished + counter, end - begin, HELD):
            sums, weights, top = _merge_parts(begin, end, part0, part_sums, part_stats, ROWS, RANK_PAD, HELD)
            _store_heads(out, None, sums, weights, top, row0, count, group, PER_PROGRAM, RANK, HEADS * RANK, False)
    else:
        sums = tl.zeros([ROWS, RANK_PAD], tl.float32)
        weights = tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        middle = lo
        if not IS_DECODE:
            middle = tl.maximum(lo, tl.minimum(whole, hi) // TILE * TILE)
            sums, weights, top = _attend_tiles(
                lo, middle, sums, weights, top, queries, rotated, rows, table, hi, positions, shift, scale,
                RANK, ROPE, BLOCK, TILE, STAGES, False, PRECISION,
            )  # fmt: skip
        sums, weights, top = _attend_tiles(
            middle, hi, sums, weights, top, queries, rotated, rows, table, hi, positions, shift, scale,
            RANK, ROPE, BLOCK, TILE, STAGES, True, PRECISION,
        )  # fmt: skip
        _store_heads(out, None, sums, weights, top, row0, count, group, PER_PROGRAM, RANK, HEADS * RANK, False)


@triton.jit
def _rotated(x, d, position, cos, sin, PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, inside):
    """x: pointers to the first dimension of every head, (heads, 1); rotated, in float32."""
    if IS_INTERLEAVED:
        partner = tl.where(d < 2 * PAIRS, d ^ 1, d)
        pair = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(d < PAIRS, d + PAIRS, tl.where(d < 2 * PAIRS, d - PAIRS, d))
        pair = d % PAIRS
        sign = tl.where(d < PAIRS, -1.0, 1.0)
    y = tl.load(x + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    at = position.to(tl.int64) * PAIRS + pair
    c = tl.load(cos + at, mask=d < 2 * PAIRS, other=1.0)
    s = tl.load(sin + at, mask=d < 2 * PAIRS, other=0.0) * sign
    return y * c[None, :] + other * s[None, :]


@triton.jit
def rope_kernel(
    q, latent, key, out, rows, cos, sin, positions, slots, q_row, key_row,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAIRS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token: the rotated parts of its queries, and its row of the cache."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, ROPE_PAD)
    inside = (h < HEADS)[:, None] & (d < ROPE)[None, :]
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    base = q + row * q_row + h[:, None] * (NOPE + ROPE) + NOPE
    y = _rotated(base, d, position, cos, sin, PAIRS, IS_INTERLEAVED, inside)
    tl.store(out + (row * HEADS + h[:, None]) * ROPE + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    if slot >= 0:
        to = rows + slot * (RANK + ROPE)
        one = tl.zeros([1, 1], tl.int32)
        own = (d < ROPE)[None, :]
        turned = _rotated(key + row * key_row + one, d, position, cos, sin, PAIRS, IS_INTERLEAVED, own)
        turned = turned.to(key.dtype.element_ty)
        tl.store(to + RANK + one + d[None, :], _cached(turned, rows.dtype.element_ty), mask=own)
        r = tl.arange(0, RANK_PAD)
        values = tl.load(latent + row * RANK + r, mask=r < RANK, other=0.0)
        tl.store(to + r, _cached(values, rows.dtype.element_ty), mask=r < RANK)


@triton.jit(do_not_specialize=["rows"])
def heads_kernel(
    x, matrices, out, rows, x_row, x_head,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile of every head's product, sums in one ascending chain."""
    PRECISION: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * 64 + tl.arange(0, 64)
    head = tl.program_id(2)
    k = tl.arange(0, 64)
    x_at = x + m.to(tl.int64)[:, None] * x_row + head * x_head + k[None, :]
    w_at = matrices + head.to(tl.int64) * (WIDTH * DEPTH) + n[:, None] * DEPTH + k[None, :]
    total = tl.zeros([ROWS, 64], tl.float32)
    wait_for_inputs(DEPENDENT)
    for at in range(0, DEPTH, 64):
        here = (at + k < DEPTH)[None, :]
        x_tile = tl.load(x_at + at, mask=(m < rows)[:, None] & here, other=0.0)
        w_tile = tl.load(w_at + at, mask=(n < WIDTH)[:, None] & here, other=0.0)
        total = tl.dot(x_tile, w_tile.T, total, input_precision=PRECISION)
    to = out + m.to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < WIDTH)[None, :])
