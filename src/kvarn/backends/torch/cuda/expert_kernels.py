"""Kernels of a layer of experts: which experts each row meets, their rows side by side, products, the weighted sum.

A (row, expert) is a pair, numbered row * ACTIVE + place, places in ascending order of experts. No number of rows or
pairs is read by the host, so a captured step is right for any routing.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-3.0e38)  # what may still be chosen is at least this, what may not is -inf


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    logits, router_bias, selection_bias, slots, num_rows, x, x_row, shared_gate, experts, shares, gates, counts,
    expert_scale, scale,
    EXPERTS: tl.constexpr, ACTIVE: tl.constexpr, GROUPS: tl.constexpr, ACTIVE_GROUPS: tl.constexpr,
    JUDGED: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_MEMBERS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, IS_SOFTMAX: tl.constexpr, RENORMALISE: tl.constexpr, HAS_ROUTER_BIAS: tl.constexpr,
    HAS_SELECTION_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_SHARED_GATE: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
):  # fmt: skip
    """One row: its experts in ascending order, their shares, and each of them counted. Padding has expert -1."""
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    PADDED: tl.constexpr = PADDED_GROUPS * PADDED_MEMBERS
    row = tl.program_id(0).to(tl.int64)
    is_real = tl.load(slots + row) >= 0 if HAS_SLOTS else row < num_rows
    i = tl.arange(0, PADDED)
    expert = i // PADDED_MEMBERS * MEMBERS + i % PADDED_MEMBERS
    inside = (i // PADDED_MEMBERS < GROUPS) & (i % PADDED_MEMBERS < MEMBERS)
    y = tl.load(logits + row * EXPERTS + expert, mask=inside, other=float("-inf"))
    if HAS_ROUTER_BIAS:
        y += tl.load(router_bias + expert, mask=inside, other=0.0)
    if IS_SOFTMAX:
        p = tl.exp(y - tl.max(y, 0))
        p = p / tl.sum(p, 0)
    else:
        p = 1 / (1 + tl.exp(-y))
    choice = p
    if HAS_SELECTION_BIAS:
        choice += tl.load(selection_bias + expert, mask=inside, other=0.0)
    choice = tl.where(choice >= LEAST, choice, LEAST)  # NaN too: as many as ACTIVE are chosen in any case
    choice = tl.where(inside, choice, float("-inf"))
    if ACTIVE_GROUPS > 0:
        members = tl.reshape(choice, [PADDED_GROUPS, PADDED_MEMBERS])
        g = tl.arange(0, PADDED_GROUPS)
        sums = tl.max(members, 1)
        if MEMBERS > 1 and JUDGED > 1:
            is_first = tl.arange(0, PADDED_MEMBERS)[None, :] == tl.argmax(members, 1)[:, None]
            sums += tl.max(tl.where(is_first, float("-inf"), members), 1)
        sums = tl.where(g < GROUPS, tl.maximum(sums, LEAST), float("-inf"))
        is_kept = g < 0
        for _ in tl.range(0, ACTIVE_GROUPS):
            best = tl.argmax(sums, 0)
            is_kept = is_kept | (g == best)
            sums = tl.where(g == best, float("-inf"), sums)
        choice = tl.reshape(tl.where(is_kept[:, None], members, float("-inf")), [PADDED])
    is_chosen = i < 0
    for _ in tl.range(0, ACTIVE):
        best = tl.argmax(choice, 0)  # the lower of equal ones
        is_chosen = is_chosen | (i == best)
        choice = tl.where(i == best, float("-inf"), choice)
    share = tl.where(is_chosen, p, 0.0)
    if RENORMALISE:
        share = share / tl.sum(share, 0)
    if HAS_EXPERT_SCALE:
        share *= tl.load(expert_scale + expert, mask=inside, other=0.0)
    to = row * ACTIVE + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(experts + to, tl.where(is_real, expert, -1), mask=is_chosen)
    tl.store(shares + to, tl.where(is_real, share * scale, 0.0), mask=is_chosen)
    tl.atomic_add(counts + expert, 1, mask=is_chosen & inside & is_real)
    if HAS_SHARED_GATE:
        c = tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        for at in tl.range(0, WIDTH, COLUMNS):
            a = tl.load(x + row * x_row + at + c, mask=at + c < WIDTH, other=0.0).to(tl.float32)
            total += a * tl.load(shared_gate + at + c, mask=at + c < WIDTH, other=0.0)
        tl.store(gates + row, 1 / (1 + tl.exp(-tl.sum(total, 0))))


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    experts, counts, num_pairs, order, tiles, num_tiles,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One expert: its pairs, ascending, behind those of the experts before it, and its tiles (expert, first, end)."""
    e = tl.program_id(0)
    i = tl.arange(0, PADDED)
    n = tl.load(counts + i, mask=i < EXPERTS, other=0)
    first = tl.sum(tl.where(i < e, n, 0), 0)
    end = first + tl.sum(tl.where(i == e, n, 0), 0)
    tile = tl.sum(tl.where(i < e, (n + TILE - 1) // TILE, 0), 0)
    if e == EXPERTS:  # one program more
        tl.store(num_tiles, tile)
    for start in tl.range(first, end, TILE):
        at = tiles + 3 * (tile + (start - first) // TILE)
        tl.store(at, e)
        tl.store(at + 1, start)
        tl.store(at + 2, end)
    if end > first:
        placed = first
        for at in tl.range(0, num_pairs, BLOCK):
            pair = at + tl.arange(0, BLOCK)
            is_own = tl.load(experts + pair, mask=pair < num_pairs, other=-1) == e
            tl.store(order + placed + tl.cumsum(is_own.to(tl.int32), 0) - 1, pair, mask=is_own)
            placed += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def activate(gate, up, KIND: tl.constexpr):
    """act(gate) * up, numbered as experts.ACTIVATIONS."""
    if KIND == 0:
        y = gate / (1 + tl.exp(-gate)) * up
    elif KIND == 1:
        y = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == 2:
        e = tl.exp(2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
        y = 0.5 * gate * (2 - 2 / (e + 1)) * up
    elif KIND == 3:
        y = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0) * up
    else:
        g = tl.minimum(gate, 7.0)
        y = (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1) * (g / (1 + tl.exp(-1.702 * g)))
    return y


@triton.jit
def rounded(total, bias, n, end, DTYPE: tl.constexpr, IS_TALL: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A product as it is stored, then with its bias."""
    y = total.to(DTYPE).to(tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + n, mask=n < end, other=0.0)
        y = (y + (b[:, None] if IS_TALL else b[None, :])).to(DTYPE).to(tl.float32)
    return y


@triton.jit
def product_kernel(
    x, weight, bias, out, order, tiles, num_tiles, columns, x_row, out_row,
    DEPTH: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, IS_TALL: tl.constexpr, IS_EVEN: tl.constexpr, IS_GATED: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Tiles of pairs times their expert's matrix, as many programs as the device holds taking one after the other.

    Gated: x by rows, the weight holds the gate's rows, then up's, and out is in the order of the tiles. Otherwise x is
    in that order, and out by pairs. Each product is the chain of matmul.py.
    """
    PRECISION: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    across = tl.cdiv(columns, COLUMNS)
    matrix = columns.to(tl.int64) * DEPTH
    k = tl.arange(0, STEP)
    for item in tl.range(tl.program_id(0), tl.load(num_tiles) * across, tl.num_programs(0)):
        tile = tiles + 3 * (item // across)
        expert = tl.load(tile).to(tl.int64)
        m = tl.load(tile + 1) + tl.arange(0, ROWS)
        is_row = m < tl.load(tile + 2)
        pair = tl.load(order + m, mask=is_row, other=0)
        n = item % across * COLUMNS + tl.arange(0, COLUMNS)
        source = pair // ACTIVE if IS_GATED else m
        to_row = m if IS_GATED else pair
        x_at = x + source.to(tl.int64)[:, None] * x_row + k[None, :]
        w_at = weight + expert * matrix * (2 if IS_GATED else 1) + n.to(tl.int64)[:, None] * DEPTH + k[None, :]
        up_at = w_at + matrix
        if IS_TALL:
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            up_total = tl.zeros([COLUMNS, ROWS], tl.float32)
        else:
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            up_total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in tl.range(0, DEPTH, STEP, num_stages=STAGES):
            if IS_EVEN:
                w_tile = tl.load(w_at + at)
                x_tile = tl.load(x_at + at, mask=is_row[:, None], other=0.0)
            else:
                w_tile = tl.load(w_at + at, mask=(n < columns)[:, None] & (at + k < DEPTH)[None, :], other=0.0)
                x_tile = tl.load(x_at + at, mask=is_row[:, None] & (at + k < DEPTH)[None, :], other=0.0)
            if IS_TALL:
                total = tl.dot(w_tile, x_tile.T, total, input_precision=PRECISION)
            else:
                total = tl.dot(x_tile, w_tile.T, total, input_precision=PRECISION)
            if IS_GATED:
                if IS_EVEN:
                    up_tile = tl.load(up_at + at)
                else:
                    up_tile = tl.load(up_at + at, mask=(n < columns)[:, None] & (at + k < DEPTH)[None, :], other=0.0)
                if IS_TALL:
                    up_total = tl.dot(up_tile, x_tile.T, up_total, input_precision=PRECISION)
                else:
                    up_total = tl.dot(x_tile, up_tile.T, up_total, input_precision=PRECISION)
        b_at = bias + expert * columns * (2 if IS_GATED else 1) if HAS_BIAS else bias
        total = rounded(total, b_at, n, columns, out.dtype.element_ty, IS_TALL, HAS_BIAS)
        if IS_GATED:
            up_total = rounded(up_total, b_at, columns + n, 2 * columns, out.dtype.element_ty, IS_TALL, HAS_BIAS)
            total = activate(total, up_total, KIND)
        if IS_TALL:
            to = out + to_row.to(tl.int64)[None, :] * out_row + n[:, None]
            inside = is_row[None, :] & (n < columns)[:, None]
        else:
            to = out + to_row.to(tl.int64)[:, None] * out_row + n[None, :]
            inside = is_row[:, None] & (n < columns)[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    products, experts, shares, shared, gates, out,
    WIDTH: tl.constexpr, ACTIVE: tl.constexpr, COLUMNS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Some columns of one row: the sum of its experts in ascending order, then the shared one; zeros for padding."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(ACTIVE):
        pair = row * ACTIVE + place
        is_real = tl.load(experts + pair) >= 0
        y = tl.load(products + pair * WIDTH + c, mask=inside & is_real, other=0.0).to(tl.float32)
        total += tl.load(shares + pair) * y
    if HAS_SHARED:
        y = tl.load(shared + row * WIDTH + c, mask=inside, other=0.0).to(tl.float32)
        total += y * tl.load(gates + row) if HAS_GATE else y
    tl.store(out + row * WIDTH + c, total.to(out.dtype.element_ty), mask=inside)
