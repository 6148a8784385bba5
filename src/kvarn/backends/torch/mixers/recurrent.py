"""Layers that carry a state from token to token, in plain torch, one row after the other.

Every row is computed by operations of one fixed shape, so its bits depend on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvarn.backends.batch import Batch, Int32
from kvarn.backends.torch.device import on_device
from kvarn.backends.torch.elementwise import by_value, exp, sigmoid
from kvarn.backends.torch.mixers.state_space import Step, convolve, mamba, mamba2, softplus
from kvarn.backends.torch.weights import (
    BlockWeights,
    DeltaNetWeights,
    Linear,
    NormWeights,
    ShortConvWeights,
    StateSpaceWeights,
)
from kvarn.models.recurrent import Recurrent, conv_channels, recurrent_of, state_floats
from kvarn.models.state_layers import GatedDeltaNet, Mamba, Mamba2, ShortConv

EPS = 1e-6  # of unit vectors


@dataclass(frozen=True, slots=True)
class RowOps:
    """What is computed for all rows at once."""

    linear: Callable[[Tensor, Linear], Tensor]
    normalise: Callable[[Tensor, NormWeights], Tensor]


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where kernels find a batch's states: by row but firsts and ends, which are by sequence; int32, -1: nowhere."""

    begins: Tensor  # first row of the row's sequence
    read: Tensor  # the slot its sequence begins with; -1: zeros
    written: Tensor  # where the state behind this row goes, if it is its sequence's last
    saved: Tensor  # where else it goes
    firsts: Tensor  # row of each sequence
    ends: Tensor


STATE_ROWS = ("begins", "read", "written", "saved")


def state_arrays(batch: Batch) -> dict[str, Int32]:
    """The arrays of StateRows for the batch's own rows."""
    lengths, held = np.diff(batch.row_starts), batch.states
    firsts, ends = batch.row_starts[:-1], batch.row_starts[1:]
    nothing = np.full(len(lengths), -1, np.int32)
    by_row = {name: np.full(len(batch.token_ids), -1, np.int32) for name in ("written", "saved")}
    assert held is not None or not batch.positions[firsts[lengths > 0]].any(), "without slots: in one piece"
    if held is not None:
        by_row["written"][ends[lengths > 0] - 1] = held.written[lengths > 0]
        by_row["saved"][held.saved_rows] = held.saved_slots
    read = np.repeat(nothing if held is None else held.read, lengths)
    return {"begins": np.repeat(firsts, lengths), "read": read, **by_row, "firsts": firsts, "ends": ends}


def make_state_rows(batch: Batch, num_rows: int, device: torch.device) -> StateRows:
    """Bring them to the device; rows of padding, up to num_rows, read and write nothing."""
    arrays = state_arrays(batch)
    for name in STATE_ROWS:
        arrays[name] = np.pad(arrays[name], (0, num_rows - len(arrays[name])), constant_values=-1)
    arrays["begins"] = np.maximum(arrays["begins"], 0)
    return StateRows(**{name: on_device(np.ascontiguousarray(one, np.int32), device) for name, one in arrays.items()})


def recur(x: Tensor, block: BlockWeights, ops: RowOps, batch: Batch, slots: Tensor | None) -> Tensor:
    """What the layer's output projection reads, of x (rows, width); slots (number, floats) hold the states."""
    mixer, weights = recurrent_of(block.spec), block.recurrent
    if isinstance(mixer, Mamba2 | Mamba):
        assert isinstance(weights, StateSpaceWeights), "a state space has its own weights"
        scan, projected = _scan(mixer, batch, slots), ops.linear(x, weights.input).float()
        if isinstance(mixer, Mamba2):
            return mamba2(projected, mixer, weights, scan).to(x.dtype)
        return mamba(projected, mixer, weights, scan).to(x.dtype)
    if isinstance(mixer, ShortConv):
        assert isinstance(weights, ShortConvWeights), "a short convolution has its own weights"
        return _short_conv(ops.linear(x, block.qkv), mixer, weights, _scan(mixer, batch, slots))
    assert isinstance(mixer, GatedDeltaNet), "an attention has no state"
    assert isinstance(weights, DeltaNetWeights), "a delta net has its own weights"
    return _delta_net(x, block, ops, weights, _scan(mixer, batch, slots))


def _scan(mixer: Recurrent, batch: Batch, slots: Tensor | None) -> Callable[[Step, torch.device], None]:
    """Take a step for every row: a sequence's state is read before its first, and written where it is wanted."""
    held = batch.states

    def scan(step: Step, device: torch.device) -> None:
        saved = {} if held is None else dict(zip(held.saved_rows.tolist(), held.saved_slots.tolist(), strict=True))
        for sequence in range(len(batch.context_lens)):
            begin, end = int(batch.row_starts[sequence]), int(batch.row_starts[sequence + 1])
            state = torch.zeros(state_floats(mixer), device=device)
            if held is None or slots is None:
                assert batch.positions[begin] == 0, "a sequence without a slot is computed in one piece"
            elif held.read[sequence] >= 0:
                state.copy_(slots[int(held.read[sequence])])
            for row in range(begin, end):
                step(row, state)
                if slots is not None and row in saved:
                    slots[saved[row]] = state
            if held is not None and slots is not None:
                slots[int(held.written[sequence])] = state

    return scan


def _short_conv(
    projected: Tensor, mixer: ShortConv, weights: ShortConvWeights, scan: Callable[[Step, torch.device], None]
) -> Tensor:
    b, c, v = projected.float().chunk(3, dim=-1)
    out = torch.zeros(len(projected), mixer.width, device=projected.device)

    def step(row: int, state: Tensor) -> None:
        out[row] = c[row] * convolve(state, b[row] * v[row], weights.conv)

    scan(step, projected.device)
    return out.to(projected.dtype)


def _delta_net(
    x: Tensor, block: BlockWeights, ops: RowOps, weights: DeltaNetWeights, scan: Callable[[Step, torch.device], None]
) -> Tensor:
    mixer = block.spec.mixer
    assert isinstance(mixer, GatedDeltaNet), "only a delta net comes here"
    heads, keys = mixer.num_value_heads, mixer.num_key_heads * mixer.key_dim
    qkv, gate = ops.linear(x, block.qkv).float(), ops.linear(x, weights.gate).float()
    alpha = ops.linear(x, weights.alpha).float() + weights.dt
    decay = exp(weights.a * by_value(softplus, alpha))
    beta = sigmoid(ops.linear(x, weights.beta).float())
    number = torch.arange(heads, device=x.device)
    of_key = number % mixer.num_key_heads if mixer.tiled else number * mixer.num_key_heads // heads
    out = torch.zeros(len(x), heads, mixer.value_dim, device=x.device)
    num_held = (mixer.kernel - 1) * conv_channels(mixer)

    def step(row: int, state: Tensor) -> None:
        mixed = convolve(state, qkv[row], weights.conv)
        mixed = mixed / (1 + exp(-mixed))
        q, k = (_unit(part.view(-1, mixer.key_dim))[of_key] for part in (mixed[:keys], mixed[keys : 2 * keys]))
        s = state[num_held:].view(heads, mixer.key_dim, mixer.value_dim)
        s *= decay[row, :, None, None]
        found = (k[:, :, None] * s).sum(dim=1)
        error = (mixed[2 * keys :].view(heads, -1) - found) * beta[row, :, None]
        s += k[:, :, None] * error[:, None, :]
        out[row] = (q[:, :, None] * s).sum(dim=1) / mixer.key_dim**0.5

    scan(step, x.device)
    normed = ops.normalise(out, weights.norm).view(len(x), -1)
    return (normed * gate / (1 + exp(-gate))).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + EPS)
