"""Alternating updates in torch: several residual streams, of which a layer computes one. x is (rows, streams, width).

Sums over streams are written out, so that the bits of a row depend on nothing else in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvarn.backends.torch.elementwise import tanh
from kvarn.backends.torch.streams.per_layer import BlockOps
from kvarn.backends.torch.streams.weights import AltUpWeights
from kvarn.backends.torch.weights import Linear
from kvarn.models.residual import AltUp

LEAST = 1e-5  # of a mean square that is divided by


def split_streams(x: Tensor, projections: Tensor, ops: BlockOps) -> Tensor:
    """The streams of what is embedded."""
    others = [_as_long(ops.linear(x, Linear(matrix)), x) for matrix in projections]
    return torch.stack([x, *others], dim=1)


def merge_streams(x: Tensor, projections: Tensor, ops: BlockOps) -> Tensor:
    """What the output norm reads."""
    first = x[:, 0].contiguous()
    total = first.float()
    for i, matrix in enumerate(projections):
        total = total + _as_long(ops.linear(x[:, i + 1].contiguous(), Linear(matrix)), first).float()
    return (total / x.shape[1]).to(x.dtype)


def predict(x: Tensor, altup: AltUp, weights: AltUpWeights, ops: BlockOps) -> Tensor:
    """Guess what the layer makes of all streams, from its input."""
    modes = _modes(x[:, altup.active].contiguous(), weights, ops)
    mixing = ops.linear(modes, weights.predict).float().view(len(x), altup.streams, altup.streams)
    guessed = [x[:, i].float() for i in range(altup.streams)]
    for i in range(altup.streams):
        for j in range(altup.streams):
            guessed[i] = guessed[i] + mixing[:, i, j, None] * x[:, j].float()
    return torch.stack(guessed, dim=1).to(x.dtype)


def correct(guessed: Tensor, computed: Tensor, altup: AltUp, weights: AltUpWeights, ops: BlockOps) -> Tensor:
    """Move all streams by what the guess of the active one was wrong."""
    share = ops.linear(_modes(computed, weights, ops), weights.correct).float() + 1
    wrong = computed.float() - guessed[:, altup.active].float()
    return (guessed.float() + share[..., None] * wrong[:, None]).to(guessed.dtype)


def scaled_active(x: Tensor, altup: AltUp, weights: AltUpWeights) -> Tensor:
    """What lets the layer's own input in."""
    active = x[:, altup.active].contiguous()
    return active if weights.scale is None else (active.float() * weights.scale).to(x.dtype)


def _modes(x: Tensor, weights: AltUpWeights, ops: BlockOps) -> Tensor:
    normed = (ops.normalise(x, weights.norm).float() / x.shape[-1]).to(x.dtype)
    return tanh(ops.linear(normed, weights.router).float()).to(x.dtype)


def _as_long(x: Tensor, wanted: Tensor) -> Tensor:
    y, target = x.float(), wanted.float()
    length = torch.sqrt(torch.mean(y * y, dim=-1, keepdim=True).clamp(min=LEAST))
    return (y * torch.sqrt(torch.mean(target * target, dim=-1, keepdim=True)) / length).to(x.dtype)
