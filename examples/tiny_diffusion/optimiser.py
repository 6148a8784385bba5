"""Muon for the stacked matrices, AdamW for embedding and norms, one learning rate for both."""

from __future__ import annotations

import torch
from torch import Tensor

MOMENTUM = 0.95
WEIGHT_DECAY = 0.1
ADAM_SHARE = 0.7  # AdamW's learning rate as a part of Muon's


class Muon:
    """Momentum whose update is the nearest orthogonal matrix, as large as an AdamW step (arXiv 2502.16982)."""

    def __init__(self, matrices: list[Tensor], others: list[Tensor]) -> None:
        self.matrices, self.others = matrices, others
        self.momenta = [torch.zeros_like(matrix) for matrix in matrices]
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients and clear them."""
        for matrix, momentum in zip(self.matrices, self.momenta, strict=True):
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            update = orthogonal(matrix.grad.lerp_(momentum, MOMENTUM))
            matrix.mul_(1 - rate * WEIGHT_DECAY)
            matrix.add_(update, alpha=-rate * 0.2 * max(matrix.shape[-2:]) ** 0.5)
            matrix.grad = None
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self.adam.param_groups[0]["lr"] = rate * ADAM_SHARE
        self.adam.step()
        self.adam.zero_grad()

    def state(self) -> dict[str, object]:
        """Return what a later run needs to go on."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, object]) -> None:
        """Go on from a saved state."""
        for momentum, saved in zip(self.momenta, state["momenta"], strict=True):
            momentum.copy_(saved)
        self.adam.load_state_dict(state["adam"])


@torch.compile(dynamic=False)
def orthogonal(matrices: Tensor) -> Tensor:
    """Return roughly U V^T of each matrix by five Newton-Schulz steps in bf16 (Jordan 2024)."""
    x = matrices.flatten(0, -3).bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).reshape(matrices.shape)
