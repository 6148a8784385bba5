"""Row-wise kernels: tokens fed on the device, norms, rope with the write to the cache, gated activations.

Each row is one program's (or one warp's) own sum, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvarn.backends.torch.cuda.dependent import LAUNCH, wait_for_inputs
from kvarn.backends.torch.rope import RopeTable
from kvarn.backends.torch.step import Step
from kvarn.backends.torch.weights import BlockWeights, NormWeights
from kvarn.models.spec import Attention

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
HEADS_PER_PROGRAM = 16
COLUMNS_PER_PROGRAM = 2048
TOKENS_PER_PROGRAM = 256


def fed_tokens(token_ids: Tensor, chosen: Tensor) -> Tensor:
    """The ids with the tokens that the last step chose in the places that name them, as step.with_chosen()."""
    count, fed = len(token_ids), torch.empty(len(token_ids), dtype=torch.int64, device=token_ids.device)
    _feed_kernel[(triton.cdiv(count, TOKENS_PER_PROGRAM),)](token_ids, chosen, fed, count, SIZE=TOKENS_PER_PROGRAM)
    return fed


@triton.jit(do_not_specialize=["count"])
def _feed_kernel(token_ids, chosen, fed, count, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    token = tl.load(token_ids + i, mask=i < count, other=0)
    named = tl.load(chosen + (-1 - token), mask=(i < count) & (token < 0), other=0)
    tl.store(fed + i, tl.where(token < 0, tl.maximum(named, 0), token).to(tl.int64), mask=i < count)


def normalise(x: Tensor, norm: NormWeights) -> Tensor:
    """norm(x), row by row."""
    x = x.contiguous()  # rows of a slice lie further apart than they are wide
    width, out = x.shape[-1], torch.empty_like(x)
    _norm_kernel[(x.numel() // width,)](
        x, out, norm.weight, norm.bias, norm.norm.eps,
        WIDTH=width, PADDED=triton.next_power_of_2(width), IS_LAYER=norm.norm.kind == "layer",
        HAS_BIAS=norm.bias is not None, num_warps=8 if width > 2048 else 4, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(
    x, out, weight, bias, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, IS_LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * WIDTH
    c = tl.arange(0, PADDED)
    inside = c < WIDTH
    a = tl.load(x + row + c, mask=inside, other=0.0).to(tl.float32)
    if IS_LAYER:
        a = tl.where(inside, a - tl.sum(a) / WIDTH, 0.0)
    y = a * (1 / tl.sqrt(tl.sum(a * a) / WIDTH + eps)) * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + c, y.to(out.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv: Tensor, block: BlockWeights, rope: RopeTable | None, step: Step, cache: tuple[Tensor, Tensor]
) -> Tensor:
    """Normalise and rotate the heads of q and k; write k and v to the cache and return q (rows, heads, head_dim).

    qkv is (rows, (heads + 2 kv_heads) * head_dim), the cache (blocks, kv_heads, block size, head_dim) each.
    """
    k, v = cache
    attention = block.attention
    if _is_normed_before(attention):
        qkv = _normalise_heads(qkv, block)
    rows, heads = len(qkv), attention.num_heads + 2 * attention.num_kv_heads
    q = torch.empty(rows, attention.num_heads, attention.head_dim, device=qkv.device, dtype=qkv.dtype)
    cos, sin = (None, None) if rope is None else (rope.cos, rope.sin)
    has_norm = attention.qk_norm is not None and not _is_normed_before(attention)
    norms = (None, None) if block.q_norm is None or block.k_norm is None else (block.q_norm.weight, block.k_norm.weight)
    sharpening = attention.temperature
    _rope_kernel[(rows, triton.cdiv(heads, HEADS_PER_PROGRAM))](
        qkv, q, k, v, cos, sin, *norms, step.positions, step.slots, qkv.stride(0),
        0.0 if attention.qk_norm is None else attention.qk_norm.eps, 0.0 if sharpening is None else sharpening.beta,
        HEADS=attention.num_heads, KV_HEADS=attention.num_kv_heads, DIM=attention.head_dim, BLOCK=k.shape[2],
        PADDED=triton.next_power_of_2(attention.head_dim), PAIRS=0 if rope is None else rope.cos.shape[1],
        IS_INTERLEAVED=attention.rope is not None and attention.rope.style == "interleaved",
        HAS_NORM=has_norm, NORM_LAST=attention.qk_norm_after_rope, LENGTH=sharpening.length if sharpening else 0,
        PER_PROGRAM=HEADS_PER_PROGRAM, **LAUNCH,
    )  # fmt: skip
    return q


def _is_normed_before(attention: Attention) -> bool:
    """Whether the norms of q and k are a pass of their own: over all heads together, or other than plain rms norms."""
    norm = attention.qk_norm
    return norm is not None and (attention.qk_norm_span == "row" or norm.kind != "rms" or norm.has_bias)


def _normalise_heads(qkv: Tensor, block: BlockWeights) -> Tensor:
    attention, norms = block.attention, (block.q_norm, block.k_norm)
    dim, is_row = attention.head_dim, attention.qk_norm_span == "row"
    parts = list(torch.split(qkv, [dim * n for n in (attention.num_heads, *[attention.num_kv_heads] * 2)], dim=1))
    for i, norm in enumerate(norms):
        assert norm is not None, "norms of q and k come together"
        width = parts[i].shape[1]
        parts[i] = normalise(parts[i].reshape(-1, width if is_row else dim), norm).view(-1, width)
    return torch.cat(parts, dim=1)


@triton.jit
def _rope_kernel(
    qkv, q, k, v, cos, sin, q_norm, k_norm, positions, slots, qkv_row, eps, beta,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, NORM_LAST: tl.constexpr,
    LENGTH: tl.constexpr, PER_PROGRAM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; q is written elsewhere, since threads read each other's halves."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    d = tl.arange(0, PADDED)
    inside = (h < HEADS + 2 * KV_HEADS)[:, None] & (d < DIM)[None, :]
    base = qkv + row * qkv_row + h[:, None] * DIM
    x = tl.load(base + d[None, :], mask=inside, other=0.0)
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    y = x.to(tl.float32)
    is_q = h < HEADS
    is_v = h >= HEADS + KV_HEADS
    partner = d
    if PAIRS > 0:
        if IS_INTERLEAVED:
            partner = tl.where(d < 2 * PAIRS, d ^ 1, d)
            pair = d // 2
            sign = tl.where(d % 2 == 0, -1.0, 1.0)
        else:
            partner = tl.where(d < PAIRS, d + PAIRS, tl.where(d < 2 * PAIRS, d - PAIRS, d))
            pair = d % PAIRS
            sign = tl.where(d < PAIRS, -1.0, 1.0)
        other = tl.load(base + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        q_weight = tl.load(q_norm + d, mask=d < DIM, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm + d, mask=d < DIM, other=0.0).to(tl.float32)
        weight = tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])
        if not NORM_LAST:
            scale = (1 / tl.sqrt(tl.sum(y * y, 1) / DIM + eps))[:, None]
            y = y * scale * weight
            if PAIRS > 0:
                q_other = tl.load(q_norm + partner, mask=d < DIM, other=0.0).to(tl.float32)
                k_other = tl.load(k_norm + partner, mask=d < DIM, other=0.0).to(tl.float32)
                other = other * scale * tl.where(is_q[:, None], q_other[None, :], k_other[None, :])
    if PAIRS > 0:
        at = position.to(tl.int64) * PAIRS + pair
        c = tl.load(cos + at, mask=d < 2 * PAIRS, other=1.0)
        s = tl.load(sin + at, mask=d < 2 * PAIRS, other=0.0) * sign
        y = y * c[None, :] + other * s[None, :]
    if HAS_NORM:
        if NORM_LAST:
            y = y * (1 / tl.sqrt(tl.sum(y * y, 1) / DIM + eps))[:, None] * weight
    if LENGTH > 0:
        turns = tl.log(1.0 + (position // LENGTH).to(tl.float32))
        y = tl.where(is_q[:, None], y * (1 + beta * turns), y)
    y = y.to(x.dtype)
    tl.store(q + (row * HEADS + h[:, None]) * DIM + d[None, :], y, mask=inside & is_q[:, None])
    if slot >= 0:
        is_k = (h >= HEADS) & (h < HEADS + KV_HEADS)
        start = (slot // BLOCK) * (KV_HEADS * BLOCK * DIM) + (slot % BLOCK) * DIM
        to_k = k + start + (h - HEADS)[:, None] * (BLOCK * DIM) + d[None, :]
        to_v = v + start + (h - HEADS - KV_HEADS)[:, None] * (BLOCK * DIM) + d[None, :]
        tl.store(to_k, _cached(y, k.dtype.element_ty), mask=inside & is_k[:, None])
        tl.store(to_v, _cached(x, v.dtype.element_ty), mask=inside & is_v[:, None])


@triton.jit
def _cached(x, dtype: tl.constexpr):
    """In the cache's type; E4M3 has no infinity: its largest number instead."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    return x.to(dtype)


def activate(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """act(gate) * up for x (rows, 2 * hidden) that holds gate, then up; act(x) where it is not gated."""
    rows, width = x.shape
    hidden = width // 2 if gated else width
    out = torch.empty(rows, hidden, device=x.device, dtype=x.dtype)
    _activate_kernel[(rows, triton.cdiv(hidden, COLUMNS_PER_PROGRAM))](
        x, out, HIDDEN=hidden, ROW=width, KIND=ACTIVATIONS[activation], GATED=gated, COLUMNS=COLUMNS_PER_PROGRAM,
        **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit
def _activate_kernel(
    x, out, HIDDEN: tl.constexpr, ROW: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < HIDDEN
    a = tl.load(x + row * ROW + c, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        y = a / (1 + tl.exp(-a))
    elif KIND == 1:
        y = 0.5 * a * (1 + tl.erf(a * 0.7071067811865476))
    else:
        e = tl.exp(2 * 0.7978845608028654 * (a + 0.044715 * a * a * a))
        y = 0.5 * a * (2 - 2 / (e + 1))
    if GATED:
        y *= tl.load(x + row * ROW + HIDDEN + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + c, y.to(out.dtype.element_ty), mask=inside)
