"""The student: a bidirectional Llama as four stacked tensors, its loss, and quantisation to Q4_0 while training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 32  # weights that share one scale in Q4_0 and Q8_0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a student."""

    vocab: int
    width: int = 512
    ffn: int = 1408
    num_layers: int = 10
    head_dim: int = 64
    context: int = 512


class Student(nn.Module):
    """Masked-diffusion transformer: RMSNorm, interleaved rope, SwiGLU, tied head, no bias, no causal mask."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = self.shape = shape
        self.embed = nn.Parameter(torch.randn(s.vocab, s.width) * 0.02)
        self.norms = nn.Parameter(torch.ones(2 * s.num_layers + 1, s.width))
        self.square = nn.Parameter(torch.randn(s.num_layers, 4, s.width, s.width) / math.sqrt(s.width))  # q k v o
        self.wide = nn.Parameter(torch.randn(s.num_layers, 3, s.ffn, s.width) / math.sqrt(s.width))  # gate up down^T
        with torch.no_grad():  # every layer begins as the identity
            self.square[:, 3] = 0
            self.wide[:, 2] = 0
        self.register_buffer("rope", _rope_table(s), persistent=False)

    def forward(self, tokens: Tensor, quantised: bool) -> Tensor:
        """Return the normed hidden state of every position."""
        square, wide, dtype = self.square, self.wide, torch.bfloat16
        if quantised:
            square, wide = fake_q4_0(square), fake_down_transposed(wide)
        rope = self.rope[: tokens.shape[1]]
        hidden = self.embed[tokens].to(dtype)
        layers = zip(square.to(dtype).unbind(0), wide.to(dtype).unbind(0), self.norms[:-1].split(2), strict=True)
        for layer in layers:
            hidden = transform(hidden, *layer, rope)
        return rms_norm(hidden, self.norms[-1])

    def loss(self, batch: Masked, quantised: bool) -> Tensor:
        """Return the mean over rows of the cross-entropy at masked positions, each weighted as the batch says."""
        hidden = self(batch.tokens, quantised).flatten(0, 1)[batch.places]
        return weighted_cross_entropy(hidden, self.embed, batch.targets, batch.weights)


@dataclass(frozen=True, slots=True)
class Masked:
    """Rows with masks: what stood at the masked places (flat indices) and what each counts."""

    tokens: Tensor
    places: Tensor
    targets: Tensor
    weights: Tensor


def mask_rows(rows: Tensor, mask_id: int, counts: Tensor) -> Masked:
    """Mask counts[i] places of row i, all sets alike likely, never the first; weigh each by 1 / counts[i].

    With counts uniform over 1..length-1 the weighted sum is an unbiased estimate, in nats per token after the
    first, of the usual bound on -log p (mask each token with probability t, weigh by 1/t, t uniform over 0..1).
    """
    scores = torch.rand(rows.shape, device=rows.device)
    scores[:, 0] = 2.0
    ranks = scores.argsort(1).argsort(1)
    masked = ranks < counts[:, None]
    num_masked = int(counts.sum()) if rows.device.type == "cpu" else rows.numel() // 2
    places = masked.flatten().to(torch.uint8).sort(descending=True, stable=True).indices[:num_masked]
    weights = (1.0 / counts.float())[:, None].expand_as(rows).flatten()[places]
    return Masked(rows.masked_fill(masked, mask_id), places, rows.flatten()[places], weights / len(rows))


def paired_counts(num_rows: int, length: int, device: str) -> Tensor:
    """Return stratified counts of masks in 1..length-1, in pairs that add up to length: always half of all tokens."""
    half = num_rows // 2
    strata = (torch.arange(half, device=device) + torch.rand(half, device=device)) / half
    low = (1 + strata * (length - 1)).long().clamp(1, length - 1)
    return torch.cat([low, length - low])


@torch.compile(dynamic=False)
def transform(hidden: Tensor, square: Tensor, wide: Tensor, norms: Tensor, rope: Tensor) -> Tensor:
    """Apply one layer: attention among all positions, then SwiGLU."""
    rows, length, width = hidden.shape
    qkv = rms_norm(hidden, norms[0]) @ square[:3].flatten(0, 1).T
    q, k, v = qkv.view(rows, length, 3, -1, 2 * rope.shape[1]).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(rotate(q, rope), rotate(k, rope), v)
    hidden = hidden + mixed.transpose(1, 2).reshape(rows, length, width) @ square[3].T
    gate, up = (rms_norm(hidden, norms[1]) @ wide[:2].flatten(0, 1).T).chunk(2, -1)
    return hidden + (F.silu(gate) * up) @ wide[2]


@torch.compile(dynamic=False)
def weighted_cross_entropy(hidden: Tensor, embed: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of -log p(target)."""
    logits = (hidden @ embed.to(hidden.dtype).T).float()
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Scale every row to unit mean square."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, 1e-5).to(x.dtype)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn neighbouring pairs of x by the angles of their positions."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rope.unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


def q4_0(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q4_0's scales and its integers in -8..7, shaped (..., blocks, 1) and (..., blocks, 32)."""
    blocks = weights.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales = (largest / -8).half().float()
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return scales, (blocks * inverse + 8.5).floor().clamp(0, 15) - 8


@torch.compile(dynamic=False)
def fake_q4_0(weights: Tensor) -> Tensor:
    """Round to what Q4_0 can hold; the gradient passes as if nothing happened."""
    scales, integers = q4_0(weights.detach())
    return weights + ((scales * integers).flatten(-2) - weights).detach()


def fake_down_transposed(wide: Tensor) -> Tensor:
    """Round gate, up and the transposed down projection, whose blocks run along the other side."""
    down = fake_q4_0(wide[:, 2].transpose(-1, -2).contiguous()).transpose(-1, -2)
    return torch.cat([fake_q4_0(wide[:, :2]), down[:, None]], 1)


def _rope_table(s: Shape) -> Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
    angles = torch.arange(s.context).float()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], -1)  # (context, head_dim / 2, 2)
