"""Tables of cosines and sines by position, computed in float64 and kept in float32 on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvarn.models.spec import Rope

FIRST_POSITIONS = 4096


class RopeTable:
    """One Rope's angles; grows with the positions asked for."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self.rope = rope
        self._device = device
        self.cos, self.sin = self._compute(0)

    def reserve(self, num_positions: int) -> None:
        """Make room for that many positions, so that the tensors stay where they are until more are asked for."""
        if num_positions > len(self.cos):
            self.cos, self.sin = self._compute(num_positions)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate pairs of dimensions of x (rows, heads, head_dim), float32."""
        cos, sin = self.cos[positions][:, None, :], self.sin[positions][:, None, :]
        n = cos.shape[-1]
        if self.rope.style == "interleaved":
            first, second = slice(0, 2 * n, 2), slice(1, 2 * n, 2)
        else:
            first, second = slice(0, n), slice(n, 2 * n)
        y = x.clone()
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., first] * sin + x[..., second] * cos
        return y

    def _compute(self, num_positions: int) -> tuple[Tensor, Tensor]:
        inverse = np.asarray(self.rope.inverse_frequencies, np.float64)
        count = max(FIRST_POSITIONS, 1 << max(0, num_positions - 1).bit_length())
        angles = np.arange(count, dtype=np.float64)[:, None] * inverse
        cos, sin = ((f(angles) * self.rope.magnitude).astype(np.float32) for f in (np.cos, np.sin))
        return torch.from_numpy(cos).to(self._device), torch.from_numpy(sin).to(self._device)
