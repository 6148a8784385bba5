"""Layers that carry a state from token to token, in plain torch, one row after the other.

Every row is computed by operations of one fixed shape, so its bits depend on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.backends.batch import Batch
from kvarn.backends.torch.weights import BlockWeights, DeltaNetWeights, Linear, NormWeights, ShortConvWeights
from kvarn.models.recurrent import conv_channels, state_floats
from kvarn.models.spec import GatedDeltaNet, ShortConv

EPS = 1e-6  # of unit vectors
Step = Callable[[int, Tensor], None]  # compute a row and bring the state from before it to behind it


@dataclass(frozen=True, slots=True)
class RowOps:
    """What is computed for all rows at once."""

    linear: Callable[[Tensor, Linear], Tensor]
    normalise: Callable[[Tensor, NormWeights], Tensor]


def recur(x: Tensor, block: BlockWeights, ops: RowOps, batch: Batch, slots: Tensor | None) -> Tensor:
    """What the layer's output projection reads, of x (rows, width); slots (number, floats) hold the states."""
    mixer, weights = block.spec.mixer, block.recurrent
    if isinstance(mixer, ShortConv):
        assert isinstance(weights, ShortConvWeights), "a short convolution has its own weights"
        return _short_conv(ops.linear(x, block.qkv), mixer, weights, _scan(mixer, batch, slots))
    assert isinstance(mixer, GatedDeltaNet), "an attention has no state"
    assert isinstance(weights, DeltaNetWeights), "a delta net has its own weights"
    return _delta_net(x, block, ops, weights, _scan(mixer, batch, slots))


def _scan(mixer: GatedDeltaNet | ShortConv, batch: Batch, slots: Tensor | None) -> Callable[[Step, torch.device], None]:
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


def _convolve(state: Tensor, row: Tensor, kernel: Tensor) -> Tensor:
    """Take a row in and return the products of the last rows with the kernel (channels, size), summed oldest first."""
    size, channels = kernel.shape[1], len(row)
    window = torch.cat([state[: (size - 1) * channels].view(size - 1, channels), row[None]])
    state[: (size - 1) * channels] = window[1:].reshape(-1)
    total = window[0] * kernel[:, 0]
    for i in range(1, size):
        total = total + window[i] * kernel[:, i]
    return total


def _short_conv(
    projected: Tensor, mixer: ShortConv, weights: ShortConvWeights, scan: Callable[[Step, torch.device], None]
) -> Tensor:
    b, c, v = projected.float().chunk(3, dim=-1)
    out = torch.zeros(len(projected), mixer.width, device=projected.device)

    def step(row: int, state: Tensor) -> None:
        out[row] = c[row] * _convolve(state, b[row] * v[row], weights.conv)

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
    decay = torch.exp(weights.a * torch.logaddexp(alpha, torch.zeros_like(alpha)))
    beta = torch.sigmoid(ops.linear(x, weights.beta).float())
    number = torch.arange(heads, device=x.device)
    of_key = number % mixer.num_key_heads if mixer.tiled else number * mixer.num_key_heads // heads
    out = torch.zeros(len(x), heads, mixer.value_dim, device=x.device)
    num_held = (mixer.kernel - 1) * conv_channels(mixer)

    def step(row: int, state: Tensor) -> None:
        mixed = _convolve(state, qkv[row], weights.conv)
        mixed = mixed / (1 + torch.exp(-mixed))
        q, k = (_unit(part.view(-1, mixer.key_dim))[of_key] for part in (mixed[:keys], mixed[keys : 2 * keys]))
        s = state[num_held:].view(heads, mixer.key_dim, mixer.value_dim)
        s *= decay[row, :, None, None]
        found = (k[:, :, None] * s).sum(dim=1)
        error = (mixed[2 * keys :].view(heads, -1) - found) * beta[row, :, None]
        s += k[:, :, None] * error[:, None, :]
        out[row] = (q[:, :, None] * s).sum(dim=1) / mixer.key_dim**0.5

    scan(step, x.device)
    normed = ops.normalise(out, weights.norm).view(len(x), -1)
    return (normed * gate / (1 + torch.exp(-gate))).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + EPS)
