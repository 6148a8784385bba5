"""Attention of large prompts on Hopper: two groups of four warps with 64 rows each, and a warp that copies keys ahead.

The arithmetic is that of attention_kernels.py, bit by bit; for causal layers alone, over blocks that are tiles of keys.
While one group computes weights, the matrix unit works for the other; both share what is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvarn.backends.torch.cuda.attention_kernels import LOG2_E
from kvarn.backends.torch.cuda.dependent import LAUNCH
from kvarn.backends.torch.step import PagedTiles
from kvarn.models.spec import Attention

ROWS = 128  # of a program: queries times the query heads of a KV head
DIMS = (64, 128)
TILE = gl.constexpr(64)  # keys of a tile, and rows of a group of warps
STAGES = 3  # tiles that are held
REGISTERS = 168  # of a thread when a program begins; the copying warp then gives most of its own away
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@gluon.jit
def _copy_tiles(
    k, v, values, k_full, v_full, empty, k_held, v_held, table, hi, head,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: tiles of keys and values, each as soon as both groups have done with the one that lay there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [1, 1], [1, 0])
    count = gl.cdiv(hi, TILE)
    block = gl.load(table)
    for i in range(count):
        at = i % STAGES
        row = (block * KV_HEADS + head) * TILE
        block = gl.load(table + gl.minimum(i + 1, count - 1))
        mbarrier.wait(empty.index(at), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(at), TILE * DIM * 2)
        tma.async_copy_global_to_shared(k, [row, 0], k_full.index(at), k_held.index(at))
        if (i + 1) * TILE <= hi:
            mbarrier.expect(v_full.index(at), TILE * DIM * 2)
            tma.async_copy_global_to_shared(v, [row, 0], v_full.index(at), v_held.index(at))
        else:  # what lies behind the sequence may be no number, and 0 times that is none
            d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
            for part in gl.static_range(TILE // 16):
                r = part * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
                places = (row + r).to(gl.int64)[:, None] * DIM + d[None, :]
                inside = (i * TILE + r < hi)[:, None] & (d >= 0)[None, :]
                v_held.index(at).slice(part * 16, 16).store(gl.load(values + places, mask=inside, other=0.0))
            fence_async_shared()
            mbarrier.arrive(v_full.index(at), count=1)


@gluon.jit
def _attend_tile(
    sums, weights, top, q_held, k_held, v_held, ones_held, k_full, v_full, empty, i, hi, positions, shift, scale,
    MASKED: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Merge tile i of the keys into the sums."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ONES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    at = i % STAGES
    phase = (i // STAGES) & 1
    wide = gl.zeros([TILE, TILE], gl.float32, SCORES)
    zeros = gl.zeros([TILE], gl.float32, OF_SCORES)
    mbarrier.wait(k_full.index(at), phase)
    scores = warpgroup_mma(q_held, k_held.index(at).permute((1, 0)), wide, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if MASKED:
        slots = i * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        seen = ((slots + shift)[None, :] <= positions[:, None]) & (slots < hi)[None, :]
        scores = gl.where(seen, scores, float("-inf"))
    top2 = gl.fma(gl.max(scores, 1), zeros + scale, zeros)
    safe = gl.where(top2 == float("-inf"), 0.0, top2)
    p = gl.exp2(gl.fma(scores, wide + scale, wide - safe[:, None])).to(gl.bfloat16)
    mbarrier.wait(v_full.index(at), phase)
    sums2 = warpgroup_mma(
        gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2)), v_held.index(at),
        gl.zeros([TILE, DIM], gl.float32, SUMS), use_acc=False, is_async=True,
    )  # fmt: skip
    weights2 = warpgroup_mma(
        gl.convert_layout(p, gl.DotOperandLayout(0, ONES, 2)), ones_held,
        gl.zeros([TILE, 16], gl.float32, ONES), use_acc=False, is_async=True,
    )  # fmt: skip
    best = gl.maximum(top, top2)
    safe = gl.where(best == float("-inf"), 0.0, best)
    old = gl.exp2(top - safe)
    new = gl.exp2(top2 - safe)
    sums2, weights2 = warpgroup_mma_wait(0, deps=[sums2, weights2])
    mbarrier.arrive(empty.index(at), count=1)
    weights = gl.fma(gl.convert_layout(gl.max(weights2, 1), OF_SCORES), new, weights * old)
    spread = gl.zeros([TILE, DIM], gl.float32, SUMS) + gl.convert_layout(new, OF_SUMS)[:, None]
    sums = gl.fma(sums2, spread, sums * gl.convert_layout(old, OF_SUMS)[:, None])
    return sums, weights, best


@gluon.jit
def _attend_group(
    q, out, q_row, q_held, k_held, v_held, ones_held, k_full, v_full, empty, row0, count, first, shift, hi, head, scale,
    INDEX: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 rows of queries, a token's heads behind each other, against all tiles of keys."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TOKENS: gl.constexpr = TILE // GROUP
    own = gl.minimum(gl.maximum(count - INDEX * TOKENS, 0), TOKENS)
    row0 += INDEX * TOKENS
    first += INDEX * TOKENS
    num_tiles = gl.cdiv(hi, TILE)
    if own == 0:  # the other group's tiles are still waited for and given back
        for i in range(num_tiles):
            mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
            mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
            mbarrier.arrive(empty.index(i % STAGES), count=1)
    else:
        r = gl.arange(0, TILE, layout=gl.SliceLayout(1, LOADED))
        d = gl.arange(0, DIM, layout=gl.SliceLayout(0, LOADED))
        places = (row0 + r // GROUP).to(gl.int64)[:, None] * q_row + ((head * GROUP + r % GROUP) * DIM)[:, None]
        inside = (r // GROUP < own)[:, None] & (d >= 0)[None, :]
        mine = q_held.index(INDEX)
        mine.store(gl.load(q + places + d[None, :], mask=inside, other=0.0))
        fence_async_shared()
        gl.thread_barrier()
        positions = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES)) // GROUP
        sums = gl.zeros([TILE, DIM], gl.float32, SUMS)
        weights = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, SCORES))
        top = gl.full([TILE], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        whole = gl.minimum(first + 1 - shift, hi) // TILE
        for i in range(whole):
            sums, weights, top = _attend_tile(
                sums, weights, top, mine, k_held, v_held, ones_held, k_full, v_full, empty, i, hi, positions, shift,
                scale, False, DIM, STAGES,
            )  # fmt: skip
        for i in range(whole, num_tiles):
            sums, weights, top = _attend_tile(
                sums, weights, top, mine, k_held, v_held, ones_held, k_full, v_full, empty, i, hi, positions, shift,
                scale, True, DIM, STAGES,
            )  # fmt: skip
        found = (sums / gl.convert_layout(weights, gl.SliceLayout(1, SUMS))[:, None]).to(out.dtype.element_ty)
        r = gl.arange(0, TILE, layout=gl.SliceLayout(1, SUMS))
        d = gl.arange(0, DIM, layout=gl.SliceLayout(0, SUMS))
        places = (row0 + r // GROUP).to(gl.int64)[:, None] * (HEADS * DIM) + ((head * GROUP + r % GROUP) * DIM)[:, None]
        gl.store(out + places + d[None, :], found, mask=(r // GROUP < own)[:, None] & (d >= 0)[None, :])


@gluon.jit(do_not_specialize=["width"])
def prompt_kernel(
    q, out, k, v, values, q_row, tile_sequences, tile_rows, tile_counts, row_positions, contexts, shifts, tables, width,
    scale, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One tile of queries and one KV head."""
    PAIR: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    head = gl.program_id(1)
    tile = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest contexts of a sequence first
    count = gl.load(tile_counts + tile)
    if count > 0:
        s = gl.load(tile_sequences + tile)
        row0 = gl.load(tile_rows + tile)
        shift = gl.load(shifts + s)
        first = gl.load(row_positions + row0).to(gl.int32)
        hi = gl.minimum(first + count - shift, gl.load(contexts + s))
        table = tables + s.to(gl.int64) * width
        q_held = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, DIM], gl.NVMMASharedLayout(128, 16, rank=2))
        k_held = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, DIM], k.layout)
        v_held = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, DIM], v.layout)
        ones = gl.full([TILE, 16], 1.0, gl.bfloat16, PAIR)
        ones_held = gl.allocate_shared_memory(gl.bfloat16, [TILE, 16], gl.NVMMASharedLayout(32, 16, rank=2), ones)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()
        gl.thread_barrier()
        gl.warp_specialize(
            [
                (_attend_group, (
                    q, out, q_row, q_held, k_held, v_held, ones_held, k_full, v_full, empty, row0, count, first, shift,
                    hi, head, scale, 0, HEADS, KV_HEADS, DIM, STAGES,
                )),
                (_attend_group, (
                    q, out, q_row, q_held, k_held, v_held, ones_held, k_full, v_full, empty, row0, count, first, shift,
                    hi, head, scale, 1, HEADS, KV_HEADS, DIM, STAGES,
                )),
                (_copy_tiles, (
                    k, v, values, k_full, v_full, empty, k_held, v_held, table, hi, head, KV_HEADS, DIM, STAGES,
                )),
            ],
            [4, 1],
            [232, 56],
        )  # fmt: skip


def suits(attention: Attention, num_queries: int, block_size: int) -> bool:
    """Whether tiles of so many queries are this kernel's, over a cache in bfloat16."""
    is_plain = attention.mask == "causal" and not (attention.window or attention.softcap or attention.sinks)
    is_fitting = attention.head_dim in DIMS and block_size == TILE.value
    return IS_HOPPER and is_plain and is_fitting and num_queries * attention.num_heads == ROWS * attention.num_kv_heads


def attend(
    q: Tensor, cache: tuple[Tensor, Tensor], tiles: PagedTiles, positions: Tensor, attention: Attention
) -> Tensor:
    """As attention.attend, where suits() is true and no query is computed in parts."""
    out, dim = torch.empty_like(q), attention.head_dim
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    copied = [TensorDescriptor.from_tensor(one.view(-1, dim), [TILE.value, dim], layout) for one in cache]
    queries = (tiles.sequences, tiles.first_rows, tiles.counts, positions, tiles.contexts, tiles.shifts)
    prompt_kernel[len(tiles.sequences), attention.num_kv_heads](
        q, out, *copied, cache[1], q.stride(0), *queries, tiles.tables, tiles.tables.stride(0),
        attention.scale * LOG2_E.value, HEADS=attention.num_heads, KV_HEADS=attention.num_kv_heads, DIM=dim,
        STAGES=STAGES, num_warps=4, maxnreg=REGISTERS, **LAUNCH,
    )  # fmt: skip
    return out
