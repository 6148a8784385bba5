"""State spaces in plain torch, and the convolution before every state; one row after the other, as in recurrent.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvarn.backends.torch.elementwise import by_value, exp
from kvarn.backends.torch.weights import StateSpaceWeights
from kvarn.models.recurrent import conv_channels
from kvarn.models.state_layers import Mamba, Mamba2

Step = Callable[[int, Tensor], None]  # compute a row and bring the state from before it to behind it
Scan = Callable[[Step, torch.device], None]


def mamba2(projected: Tensor, mixer: Mamba2, weights: StateSpaceWeights, scan: Scan) -> Tensor:
    """What the output projection reads, of ssm_in(x) (rows, inputs)."""
    heads, channels = mixer.num_heads, conv_channels(mixer)
    z, y, dt = torch.split(projected, [mixer.values, channels, heads], dim=-1)
    steps = by_value(softplus, dt + weights.dt).clamp(min=mixer.min_step, max=mixer.max_step)
    decay = exp(weights.a * steps)
    of_group = torch.arange(heads, device=z.device) * mixer.num_groups // heads
    out = torch.zeros(len(z), heads, mixer.head_dim, device=z.device)
    num_held = (mixer.kernel - 1) * channels

    def step(row: int, state: Tensor) -> None:
        mixed = _silu(_biased(convolve(state, y[row], weights.conv), weights))
        v = mixed[: mixer.values].view(heads, mixer.head_dim)
        b, c = mixed[mixer.values :].view(2, mixer.num_groups, mixer.state_dim)[:, of_group]
        s = state[num_held:].view(heads, mixer.state_dim, mixer.head_dim)
        s *= decay[row, :, None, None]
        s += b[:, :, None] * (v * steps[row, :, None])[:, None, :]
        out[row] = (c[:, :, None] * s).sum(dim=1) + weights.d[:, None] * v

    scan(step, z.device)
    gate, found = _silu(z), out.view(len(z), -1)
    found = found if mixer.norm_first else found * gate
    if mixer.norm is not None and weights.norm is not None:
        grouped = found.view(len(z), mixer.num_groups, -1)
        found = _unit_rms(grouped, mixer.norm.eps).view(len(z), -1) * weights.norm
    return found * gate if mixer.norm_first else found


def mamba(projected: Tensor, mixer: Mamba, weights: StateSpaceWeights, scan: Scan) -> Tensor:
    """The same of a layer whose steps, B and C are made of what the convolution gives."""
    y, z = projected.chunk(2, dim=-1)
    out, num_held = torch.zeros_like(y), (mixer.kernel - 1) * mixer.width
    assert weights.parameters is not None, "a selective layer has parameters"
    assert weights.steps is not None, "a selective layer has steps"
    parameters, ranks, sizes = weights.parameters, weights.steps, [mixer.rank, mixer.state_dim, mixer.state_dim]

    def step(row: int, state: Tensor) -> None:
        v = _silu(_biased(convolve(state, y[row], weights.conv), weights))
        parts = torch.split((parameters * v).sum(dim=-1), sizes)
        if mixer.parameter_norm_eps is not None:
            parts = tuple(_unit_rms(part, mixer.parameter_norm_eps) for part in parts)
        steps = by_value(softplus, (ranks * parts[0]).sum(dim=-1) + weights.dt)
        s = state[num_held:].view(mixer.width, mixer.state_dim)
        s *= exp(weights.a * steps[:, None])
        s += (v * steps)[:, None] * parts[1]
        out[row] = (s * parts[2]).sum(dim=-1) + weights.d * v

    scan(step, z.device)
    return out * _silu(z)


def convolve(state: Tensor, row: Tensor, kernel: Tensor) -> Tensor:
    """Take a row in and return the products of the last rows with the kernel (channels, size), summed oldest first."""
    size, channels = kernel.shape[1], len(row)
    window = torch.cat([state[: (size - 1) * channels].view(size - 1, channels), row[None]])
    state[: (size - 1) * channels] = window[1:].reshape(-1)
    total = window[0] * kernel[:, 0]
    for i in range(1, size):
        total = total + window[i] * kernel[:, i]
    return total


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _biased(x: Tensor, weights: StateSpaceWeights) -> Tensor:
    return x if weights.conv_bias is None else x + weights.conv_bias


def _silu(x: Tensor) -> Tensor:
    return x / (1 + exp(-x))


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)
