"""stories15M (MIT): reads the llama2.c file, samples stories from it. Knows nothing of diffusion."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

BOS = 1
NUM_BYTE_TOKENS = 256
FIRST_BYTE_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary as SentencePiece stores it."""

    text: str
    score: float


@dataclass(frozen=True, slots=True)
class TeacherShape:
    """The header of a llama2.c file."""

    width: int
    ffn: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    context: int


class Teacher:
    """A causal Llama with a static KV cache, for sampling many stories at once."""

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        data = path.read_bytes()
        self.shape = TeacherShape(*struct.unpack("7i", data[:28]))
        self.weights, self.num_bytes = _read_weights(data, self.shape, device, dtype)
        self.pieces = _read_pieces(data[self.num_bytes :], self.shape.vocab)
        self.rope = _rope_table(self.shape, device)

    def forward(self, tokens: Tensor, cache: Tensor, start: int) -> Tensor:
        """Return the last hidden states of tokens at positions start.. and write their keys and values."""
        hidden = self.weights["embed"][tokens]
        rope = self.rope[start : start + tokens.shape[1]]
        for layer in range(self.shape.num_layers):
            hidden = hidden + self._attend(layer, hidden, cache[layer], start, rope)
            hidden = hidden + self._feed_forward(layer, hidden)
        return _rms_norm(hidden, self.weights["final_norm"])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of all tokens after each hidden state."""
        return hidden @ self.weights["embed"].T

    def new_cache(self, rows: int) -> Tensor:
        """Return room for the keys and values of so many sequences: (layer, k or v, rows, heads, context, head_dim)."""
        s = self.shape
        size = (s.num_layers, 2, rows, s.num_heads, s.context, s.width // s.num_heads)
        return torch.zeros(size, device=self.rope.device, dtype=self.weights["embed"].dtype)

    def _attend(self, layer: int, hidden: Tensor, cache: Tensor, start: int, rope: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        normed = _rms_norm(hidden, self.weights["attn_norm"][layer])
        heads = [
            (normed @ self.weights[name][layer].T).view(rows, length, self.shape.num_heads, -1).transpose(1, 2)
            for name in ("q", "k", "v")
        ]
        end = start + length
        cache[0, :, :, start:end] = _rotate(heads[1], rope)
        cache[1, :, :, start:end] = heads[2]
        mixed = F.scaled_dot_product_attention(
            _rotate(heads[0], rope), cache[0, :, :, :end], cache[1, :, :, :end], is_causal=length > 1 and start == 0
        )
        return mixed.transpose(1, 2).reshape(rows, length, width) @ self.weights["o"][layer].T

    def _feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        w = self.weights
        normed = _rms_norm(hidden, w["ffn_norm"][layer])
        return (F.silu(normed @ w["gate"][layer].T) * (normed @ w["up"][layer].T)) @ w["down"][layer].T


@torch.no_grad()
def sample_stories(teacher: Teacher, rows: int, length: int, temperature: float) -> Tensor:
    """Return (rows, length) tokens drawn at a temperature, each row beginning with BOS.

    Beyond the teacher's context its window slides by half: it was trained on text cut at any place.
    """
    context = teacher.shape.context
    tokens = torch.full((rows, length), BOS, device=teacher.rope.device)
    cache = teacher.new_cache(rows)
    window = 0
    for position in range(1, length):
        if position - window == context:
            window += context // 2
            first = window
        else:
            first = position - 1
        hidden = teacher.forward(tokens[:, first:position], cache, first - window)
        tokens[:, position] = choose(teacher.logits(hidden[:, -1]), temperature)
    return tokens


@torch.compile(dynamic=False)
def choose(logits: Tensor, temperature: float) -> Tensor:
    """Draw one token per row by the Gumbel trick."""
    uniform = torch.rand_like(logits, dtype=torch.float32).clamp_min(1e-20)
    return (logits.float() / temperature - torch.log(-torch.log(uniform))).argmax(-1)


@torch.no_grad()
def entropy_rate(teacher: Teacher, tokens: Tensor, temperature: float) -> float:
    """Return the mean nats per token after BOS of stories under the distribution they were drawn from."""
    total = 0.0
    for rows in tokens.split(64):
        hidden = teacher.forward(rows[:, :-1], teacher.new_cache(len(rows)), 0)
        logits = teacher.logits(hidden).float() / temperature
        total += float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
    return total / tokens[:, 1:].numel()


def _read_weights(data: bytes, s: TeacherShape, device: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], int]:
    n, d, f = s.num_layers, s.width, s.ffn
    shapes = {
        "embed": (s.vocab, d), "attn_norm": (n, d), "q": (n, d, d), "k": (n, d, d), "v": (n, d, d), "o": (n, d, d),
        "ffn_norm": (n, d), "gate": (n, f, d), "down": (n, d, f), "up": (n, f, d), "final_norm": (d,),
    }  # fmt: skip
    offset, weights = 28, {}
    for name, shape in shapes.items():
        count = math.prod(shape)
        flat = torch.frombuffer(bytearray(data[offset : offset + 4 * count]), dtype=torch.float32)
        weights[name] = flat.view(shape).to(device, dtype)
        offset += 4 * count
    return weights, offset + 4 * s.context * (d // s.num_heads)  # the rope tables are computed, not read


def _read_pieces(data: bytes, vocab: int) -> list[Piece]:
    offset, pieces = 4, []
    for _ in range(vocab):
        score, size = struct.unpack_from("fi", data, offset)
        raw = data[offset + 8 : offset + 8 + size]
        pieces.append(Piece(raw.decode("utf-8", "replace"), score))
        offset += 8 + size
    return pieces


def _rope_table(s: TeacherShape, device: str) -> Tensor:
    head_dim = s.width // s.num_heads
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.arange(s.context, device=device).float()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], -1)  # (context, head_dim / 2, 2)


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rope.unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), 1e-5).to(x.dtype)
