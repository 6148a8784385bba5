"""Functions of single values whose bits do not depend on how many there are.

On a CPU torch computes whole vectors by one implementation and what is left over, at the end or of a thread's share, by
another; sigmoid and softplus then round differently where vectors have 16 lanes. So values are given in whole vectors,
fewer at a time than a thread's share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

VECTORS = 64  # values: two vectors of 16 are computed at a time, four in other releases
SHARE = 16384  # values; torch divides from 32,768 on


def by_value(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for a function of single values."""
    if x.device.type != "cpu":
        return function(x)
    flat = F.pad(x.reshape(-1), (0, -x.numel() % VECTORS))
    return torch.cat([function(part) for part in torch.split(flat, SHARE)])[: x.numel()].view(x.shape)


def exp(x: Tensor) -> Tensor:
    return by_value(torch.exp, x)


def sigmoid(x: Tensor) -> Tensor:
    return by_value(torch.sigmoid, x)


def tanh(x: Tensor) -> Tensor:
    return by_value(torch.tanh, x)
