"""Layers that carry a state from token to token: convolutions of all rows at once, delta nets one row after the other.

A program holds some columns of one head's state of one sequence, and brings it from row to row; columns do not know
each other. Every row is the same instructions, so chunks and neighbours change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvarn.backends.torch.mixers.recurrent import EPS, StateRows
from kvarn.backends.torch.weights import DeltaNetWeights, NormWeights
from kvarn.models.recurrent import conv_channels
from kvarn.models.state_layers import GatedDeltaNet, ShortConv

SHORT_COLUMNS = 256  # channels of one program
STATE_COLUMNS = 8  # of one program and warp


@dataclass(frozen=True, slots=True)
class Projections:
    """What a delta net's matrices give for every row, in the type of the activations."""

    qkv: Tensor  # (rows, channels)
    gate: Tensor  # (rows, value heads * value_dim)
    alpha: Tensor  # (rows, value heads)
    beta: Tensor  # (rows, value heads)


def short_conv(projected: Tensor, conv: Tensor, mixer: ShortConv, rows: StateRows, states: Tensor) -> Tensor:
    """c * conv(b * v) of rows that hold b, c, v; states (slots, floats) are read and written."""
    out = torch.empty(len(projected), mixer.width, device=projected.device, dtype=projected.dtype)
    _conv_kernel[(len(projected), triton.cdiv(mixer.width, SHORT_COLUMNS))](
        projected, conv, states, rows.begins, rows.read, rows.written, rows.saved, out, projected.stride(0),
        states.stride(0), EPS, CHANNELS=mixer.width, KERNEL=mixer.kernel, KEY_BLOCKS=0, KEY_DIM=1,
        VALUE_DIM=SHORT_COLUMNS, BLOCK=SHORT_COLUMNS, IS_SHORT=True,
    )  # fmt: skip
    return out


def delta_net(
    given: Projections, weights: DeltaNetWeights, mixer: GatedDeltaNet, rows: StateRows, states: Tensor
) -> Tensor:
    """norm(o) * silu(gate) of every row, (rows, value heads * value_dim)."""
    count, device = len(given.qkv), given.qkv.device
    channels, heads = conv_channels(mixer), mixer.num_value_heads
    mixed = torch.empty(count, channels, device=device)
    _conv_kernel[(count, 2 * mixer.num_key_heads + heads)](
        given.qkv, weights.conv, states, rows.begins, rows.read, rows.written, rows.saved, mixed, given.qkv.stride(0),
        states.stride(0), EPS, CHANNELS=channels, KERNEL=mixer.kernel, KEY_BLOCKS=2 * mixer.num_key_heads,
        KEY_DIM=mixer.key_dim, VALUE_DIM=mixer.value_dim, IS_SHORT=False,
        BLOCK=triton.next_power_of_2(max(mixer.key_dim, mixer.value_dim)),
    )  # fmt: skip
    found = torch.empty(count, heads, mixer.value_dim, device=device)
    _scan_kernel[(len(rows.firsts), heads, triton.cdiv(mixer.value_dim, STATE_COLUMNS))](
        mixed, given.alpha, given.beta, weights.a, weights.dt, states, rows.firsts, rows.ends, rows.read, rows.written,
        rows.saved, found, states.stride(0), (mixer.kernel - 1) * channels, 1 / mixer.key_dim**0.5,
        CHANNELS=channels, HEADS=heads, KEY_HEADS=mixer.num_key_heads, KEY_DIM=mixer.key_dim,
        VALUE_DIM=mixer.value_dim, PADDED=triton.next_power_of_2(mixer.key_dim), COLUMNS=STATE_COLUMNS,
        IS_TILED=mixer.tiled, num_warps=1,
    )  # fmt: skip
    return _gate(found, given.gate, weights.norm)


def _gate(found: Tensor, gate: Tensor, norm: NormWeights) -> Tensor:
    count, heads, dim = found.shape
    out = torch.empty(count, heads * dim, device=gate.device, dtype=gate.dtype)
    _gate_kernel[(count, heads)](
        found, gate, norm.weight, out, norm.norm.eps, HEADS=heads, DIM=dim, PADDED=triton.next_power_of_2(dim),
        num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _conv_kernel(
    x, weight, states, begins, read, written, saved, out, x_row, state_floats, eps,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, KEY_BLOCKS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, IS_SHORT: tl.constexpr,
):  # fmt: skip
    """Some channels of one row: one head, of unit length where it is one of q or k. The last rows go to the states.

    rows       begin-3 begin-2 begin-1 | begin  begin+1 ...      with KERNEL 4
    in states  row 0   1       2       | the batch's own
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    is_key = block < KEY_BLOCKS
    first = tl.where(is_key, block * KEY_DIM, KEY_BLOCKS * KEY_DIM + (block - KEY_BLOCKS) * VALUE_DIM)
    d = tl.arange(0, BLOCK)
    c = first + d
    inside = (d < tl.where(is_key, KEY_DIM, VALUE_DIM)) & (c < CHANNELS)
    begin = tl.load(begins + row)
    slot = tl.load(read + row).to(tl.int64)
    to_written = tl.load(written + row).to(tl.int64)
    to_saved = tl.load(saved + row).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(KERNEL):
        source = row - (KERNEL - 1 - i)
        is_new = source >= begin
        new = tl.load(x + source * x_row + c, mask=inside & is_new, other=0.0).to(tl.float32)
        if IS_SHORT:
            new *= tl.load(x + source * x_row + 2 * CHANNELS + c, mask=inside & is_new, other=0.0).to(tl.float32)
        held = states + slot * state_floats + (source - begin + KERNEL - 1) * CHANNELS + c
        old = tl.load(held, mask=inside & (source < begin) & (slot >= 0), other=0.0)
        value = tl.where(is_new, new, old)
        total += value * tl.load(weight + c * KERNEL + i, mask=inside, other=0.0)
        if i > 0:
            at = states + (i - 1) * CHANNELS + c
            tl.store(at + to_written * state_floats, value, mask=inside & (to_written >= 0))
            tl.store(at + to_saved * state_floats, value, mask=inside & (to_saved >= 0))
    if IS_SHORT:
        total *= tl.load(x + row * x_row + CHANNELS + c, mask=inside, other=0.0).to(tl.float32)
    else:
        total = total / (1 + tl.exp(-total))
        total = total / tl.where(is_key, tl.sqrt(tl.sum(tl.where(inside, total * total, 0.0), 0) + eps), 1.0)
    tl.store(out + row * CHANNELS + c, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scan_kernel(
    mixed, alpha, beta, a, dt, states, firsts, ends, read, written, saved, out, state_floats, state_first, scale,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, IS_TILED: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state through the rows of one sequence; the next row is read while one is computed."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(firsts + sequence)
    end = tl.load(ends + sequence)
    is_there = begin < end
    k = tl.arange(0, PADDED)
    v = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (k < KEY_DIM)[:, None] & (v < VALUE_DIM)[None, :]
    held = states + state_first + (head * KEY_DIM + k[:, None]) * VALUE_DIM + v[None, :]
    slot = tl.load(read + begin, mask=is_there, other=-1).to(tl.int64)
    state = tl.load(held + slot * state_floats, mask=inside & (slot >= 0), other=0.0)
    key_head = head % KEY_HEADS if IS_TILED else head * KEY_HEADS // HEADS
    q_at = mixed + key_head * KEY_DIM + k
    k_at = q_at + KEY_HEADS * KEY_DIM
    v_at = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    rate = tl.load(a + head)
    shift = tl.load(dt + head)
    row = begin.to(tl.int64)
    q_row = tl.load(q_at + row * CHANNELS, mask=(k < KEY_DIM) & is_there, other=0.0)
    k_row = tl.load(k_at + row * CHANNELS, mask=(k < KEY_DIM) & is_there, other=0.0)
    v_row = tl.load(v_at + row * CHANNELS, mask=(v < VALUE_DIM) & is_there, other=0.0)
    alpha_row = tl.load(alpha + row * HEADS + head, mask=is_there, other=0.0).to(tl.float32)
    beta_row = tl.load(beta + row * HEADS + head, mask=is_there, other=0.0).to(tl.float32)
    for now in tl.range(begin, end):
        is_next = now + 1 < end
        q_next = tl.load(q_at + (row + 1) * CHANNELS, mask=(k < KEY_DIM) & is_next, other=0.0)
        k_next = tl.load(k_at + (row + 1) * CHANNELS, mask=(k < KEY_DIM) & is_next, other=0.0)
        v_next = tl.load(v_at + (row + 1) * CHANNELS, mask=(v < VALUE_DIM) & is_next, other=0.0)
        alpha_next = tl.load(alpha + (row + 1) * HEADS + head, mask=is_next, other=0.0).to(tl.float32)
        beta_next = tl.load(beta + (row + 1) * HEADS + head, mask=is_next, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * softplus(alpha_row + shift))
        error = (v_row - tl.sum(k_row[:, None] * state, 0)) / (1 + tl.exp(-beta_row))
        state += k_row[:, None] * error[None, :]
        tl.store(
            out + (row * HEADS + head) * VALUE_DIM + v, tl.sum(q_row[:, None] * state, 0) * scale, mask=v < VALUE_DIM
        )
        to = tl.load(saved + row).to(tl.int64)
        tl.store(held + to * state_floats, state, mask=inside & (to >= 0))
        q_row, k_row, v_row, alpha_row, beta_row = q_next, k_next, v_next, alpha_next, beta_next
        row += 1
    to = tl.load(written + end - 1, mask=is_there, other=-1).to(tl.int64)
    tl.store(held + to * state_floats, state, mask=inside & (to >= 0))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also where exp(x) is lost beside 1."""
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(e < 1e-4, e - 0.5 * e * e, tl.log(1 + e))


@triton.jit
def _gate_kernel(found, gate, weight, out, eps, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """One head of one row: its rms norm times silu(gate)."""
    at = (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * DIM
    d = tl.arange(0, PADDED)
    inside = d < DIM
    y = tl.load(found + at + d, mask=inside, other=0.0)
    y = y / tl.sqrt(tl.sum(y * y, 0) / DIM + eps) * tl.load(weight + d, mask=inside, other=0.0)
    g = tl.load(gate + at + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at + d, (y * g / (1 + tl.exp(-g))).to(out.dtype.element_ty), mask=inside)
