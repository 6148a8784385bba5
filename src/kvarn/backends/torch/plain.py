"""The operations of a model in pure torch: for the CPU, Apple GPUs, and as the second definition beside the reference.

On the CPU every row is computed by operations of one fixed shape, so its bits depend on nothing else in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.backends.batch import Batch
from kvarn.backends.torch.cache import CachedRows, DeviceCache
from kvarn.backends.torch.cuda.quantized.pack import QuantizedMatrix
from kvarn.backends.torch.denoising.confidence import most_confident
from kvarn.backends.torch.denoising.keep import AllHeads, heads_here, pack_kept
from kvarn.backends.torch.elementwise import by_value, exp, sigmoid, tanh
from kvarn.backends.torch.mixers.recurrent import RowOps, recur
from kvarn.backends.torch.rope import RopeTable
from kvarn.backends.torch.step import PIECE, ROWS, TILE, PagedTiles, Piece, Step, Tiles, make_tiles
from kvarn.backends.torch.weights import BlockWeights, ExpertStack, ExpertWeights, Linear, ModelWeights, NormWeights
from kvarn.models.spec import Activation, FeedForward, MixtureOfExperts, Temperature

Matmul = Callable[[Tensor, Tensor | QuantizedMatrix], Tensor]


class PlainOps:
    """Everything in torch, sums and norms in float32. matmul(rows, matrix) is all that a device may replace."""

    can_be_captured = False
    reads_packed = False

    def __init__(self, matmul: Matmul | None = None) -> None:
        self._matmul = matmul or tiled_matmul
        self.all_heads: AllHeads = heads_here

    def prepare(self, weights: ModelWeights) -> None:
        """Nothing is chosen by time here."""

    def row_multiple(self, num_rows: int) -> int:  # noqa: ARG002
        return ROWS

    def plan(self, batch: Batch, cache: DeviceCache) -> Tiles | PagedTiles:
        return make_tiles(batch, cache.block_size, cache.device)

    def lookup(self, tokens: Tensor | QuantizedMatrix, token_ids: Tensor) -> Tensor:
        assert isinstance(tokens, Tensor), "plain operations have dense matrices"
        return tokens[token_ids]

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Multiply rows by a matrix and add its bias."""
        y = self._matmul(x, linear.weight)
        return y if linear.bias is None else (y + linear.bias).to(y.dtype)

    def logits(self, x: Tensor, head: Linear) -> Tensor:
        return self._matmul(x, head.weight).float()

    def most_confident(self, logits: Tensor, banned: int) -> tuple[Tensor, Tensor, Tensor]:
        return most_confident(logits, banned)

    def add_linear(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        return residual + self.linear(x, linear)

    def normalise(self, x: Tensor, weights: NormWeights) -> Tensor:
        """Normalise the last axis in float32."""
        y = x.float()
        if weights.norm.kind == "layer":
            y = y - y.mean(dim=-1, keepdim=True)
        y = y / torch.sqrt(torch.mean(y * y, dim=-1, keepdim=True) + weights.norm.eps) * weights.weight
        return (y if weights.bias is None else y + weights.bias).to(x.dtype)

    def linear_activate(self, x: Tensor, linear: Linear, ffn: FeedForward) -> Tensor:
        y = self.linear(x, linear)
        if ffn.gate_cutoff is not None:
            gate, up = y.float().chunk(2, dim=-1)
            deviation, mean = torch.std_mean(gate.contiguous(), dim=-1, correction=0, keepdim=True)
            y = torch.cat([torch.relu(gate - (mean + deviation * ffn.gate_cutoff)), up], dim=-1).to(y.dtype)
        return self.activate(y, ffn.activation, gated=ffn.gated)

    def activate(self, x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
        """act(gate) * up of rows that hold gate, then up; act(up) of those without a gate."""
        y = x.float()
        if not gated:
            return _activate(y, activation).to(x.dtype)
        gate, up = y.chunk(2, dim=-1)
        if activation == "swiglu_oai":
            gate = gate.clamp(max=7.0)
            return ((up.clamp(-7.0, 7.0) + 1) * (gate / (1 + exp(-1.702 * gate)))).to(x.dtype)
        return (_activate(gate.contiguous(), activation) * up).to(x.dtype)

    def attend(
        self, qkv: Tensor, block: BlockWeights, rope: RopeTable | None, step: Step, cache: DeviceCache
    ) -> Tensor:
        """Attention from projected rows to the heads' outputs (rows, heads x head_dim); K and V are cached first."""
        attention = block.attention
        heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        parts = qkv.float().view(len(qkv), -1, dim)
        q = self._position(parts[:, :heads], block, block.q_norm, rope, step.positions)
        q = q * _query_factors(attention.temperature, step.positions)
        keys: Tensor | CachedRows
        values: Tensor | CachedRows
        if attention.kv_source is not None:
            assert step.slots is not None, "only what is cached can be shared"
            keys, values = cache.rows(attention.kv_source)
        else:
            k, v = torch.split(parts[:, heads:], [kv_heads, kv_heads], dim=1)
            k = self._position(k, block, block.k_norm, rope, step.positions)[: step.num_rows]
            v = _normed_values(v, attention.value_norm_eps)[: step.num_rows]
            keys, values = k, v
            if step.slots is not None:
                cache.store(block.index, step.slots[: step.num_rows], k, v)
                keys, values = cache.rows(block.index)
                pack_kept(q, block, step, cache, self.all_heads)
        assert isinstance(step.tiles, Tiles), "plain attention has plain tiles"
        found = attend_tiles(q, keys, values, block, step.tiles)
        out = torch.zeros_like(q)
        out[: step.num_rows] = found
        return out.view(len(q), -1).to(qkv.dtype)

    def _position(
        self, x: Tensor, block: BlockWeights, norm: NormWeights | None, rope: RopeTable | None, positions: Tensor
    ) -> Tensor:
        """Norm and rope of Q or K, (rows, heads, head_dim)."""
        attention = block.attention

        def normalised(x: Tensor) -> Tensor:
            if norm is None:
                return x
            return self.normalise(x.flatten(1) if attention.qk_norm_span == "row" else x, norm).view(x.shape)

        x = x if attention.qk_norm_after_rope else normalised(x)
        x = x if rope is None else rope.rotate(x, positions)
        return normalised(x) if attention.qk_norm_after_rope else x

    def attend_latent(
        self, _x: Tensor, _block: BlockWeights, _rope: RopeTable | None, _step: Step, _cache: DeviceCache, /
    ) -> Tensor | None:
        """No kernel here: mixers.mla computes it."""
        return None

    def recur(self, x: Tensor, block: BlockWeights, step: Step, states: Tensor | None) -> Tensor:
        return recur(x, block, RowOps(self.linear, self.normalise), step.batch, states)

    def experts(
        self,
        x: Tensor,
        weights: ExpertWeights,
        moe: MixtureOfExperts,
        step: Step,  # noqa: ARG002
        routed: Tensor | None = None,
    ) -> Tensor:
        """Every expert's rows through its matrices, added in ascending order of experts."""
        chosen, share = route(self.linear(x if routed is None else routed, weights.router).float(), weights, moe)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(chosen).tolist():
            rows = (chosen == expert).any(dim=-1).nonzero()[:, 0]
            weight, read = share[rows, expert, None], x[rows]
            if moe.weighs_input:
                weight, read = torch.ones_like(weight), (weight * read).to(x.dtype)
            hidden = self.activate(self._of_expert(read, weights.gate_up, expert), moe.activation, gated=moe.gated)
            out[rows] += weight * self._of_expert(hidden, weights.down, expert).float()
        if weights.shared is not None:
            hidden = self.activate(self.linear(x, weights.shared.gate_up), moe.activation, gated=moe.gated)
            found = self.linear(hidden, weights.shared.down).float()
            if weights.shared_gate is not None:
                found = found * sigmoid((x.float() * weights.shared_gate).sum(dim=-1, keepdim=True))
            out = out + found
        return (out if weights.bias is None else out + weights.bias).to(x.dtype)

    def _of_expert(self, x: Tensor, stack: ExpertStack, expert: int) -> Tensor:
        return self.linear(x, Linear(stack.weight[expert], None if stack.bias is None else stack.bias[expert]))


def _query_factors(temperature: Temperature | None, positions: Tensor) -> Tensor | float:
    """What the queries of each row are multiplied by, (rows, 1, 1)."""
    if temperature is None:
        return 1.0
    turns = by_value(torch.log1p, ((positions + temperature.offset) // temperature.length).float())
    return (1 + temperature.beta * turns)[:, None, None]


def _normed_values(v: Tensor, eps: float | None) -> Tensor:
    return v if eps is None else v / torch.sqrt(torch.mean(v * v, dim=-1, keepdim=True) + eps)


def tiled_matmul(x: Tensor, weight: Tensor | QuantizedMatrix) -> Tensor:
    """Rows times a matrix (out, in). On the CPU ROWS rows at a time: a library's sums depend on how many there are."""
    assert isinstance(weight, Tensor), "plain operations have dense matrices"
    if x.device.type != "cpu":
        return F.linear(x, weight)
    padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
    parts = [F.linear(rows, weight) for rows in torch.split(padded, ROWS)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: len(x)]


def route(logits: Tensor, weights: ExpertWeights, moe: MixtureOfExperts) -> tuple[Tensor, Tensor]:
    """The experts of every row, (rows, num_active), and every expert's share of them, (rows, experts)."""
    if moe.mixer_margin is not None:
        return _mix_sparsely(logits, moe.num_active, moe.mixer_margin)
    p = torch.softmax(logits, dim=-1) if moe.scoring == "softmax" else sigmoid(logits)
    choice = p if weights.selection_bias is None else p + weights.selection_bias
    if moe.groups is not None:
        members = choice.view(len(p), moe.groups.count, -1)
        sums = members.sort(dim=-1).values[..., -moe.groups.num_judged :].sum(dim=-1)
        kept = torch.argsort(sums, dim=-1, descending=True, stable=True)[:, : moe.groups.num_active]
        is_dropped = torch.ones_like(sums, dtype=torch.bool).scatter_(1, kept, False)
        choice = members.masked_fill(is_dropped[..., None], -math.inf).view(choice.shape)
    chosen = torch.argsort(choice, dim=-1, descending=True, stable=True)[:, : moe.num_active]
    share = torch.zeros_like(p).scatter_(1, chosen, p.gather(1, chosen))
    if moe.renormalise:
        share = share / share.sum(dim=-1, keepdim=True)
    if weights.scale is not None:
        share = share * weights.scale
    return chosen, share * moe.scale


def _mix_sparsely(logits: Tensor, num_active: int, margin: float) -> tuple[Tensor, Tensor]:
    left, share, chosen = logits.clone(), torch.zeros_like(logits), []
    for _ in range(num_active):
        best = torch.argsort(left, dim=-1, descending=True, stable=True)[:, :1]
        largest = left.gather(1, best)
        is_far = (largest - logits) / torch.maximum(logits.abs(), largest) > margin
        share.scatter_(1, best, torch.softmax(left.masked_fill(is_far, -math.inf), dim=-1).gather(1, best))
        left.scatter_(1, best, -math.inf)
        chosen.append(best)
    return torch.cat(chosen, dim=-1), share


def attend_tiles(
    q: Tensor, keys: Tensor | CachedRows, values: Tensor | CachedRows, block: BlockWeights, tiles: Tiles
) -> Tensor:
    """Attend piece by piece and merge from left to right; the rows of the batch, (rows, heads, head_dim)."""
    attention = block.attention
    group = attention.num_heads // attention.num_kv_heads
    count, dim = len(tiles.rows), attention.head_dim
    queries = q[tiles.rows].view(count, TILE, -1, group, dim).transpose(1, 2).reshape(count, -1, TILE * group, dim)
    largest = torch.full(queries.shape[:3], -math.inf, device=q.device)
    total, out = torch.zeros_like(largest), torch.zeros_like(queries)
    for piece in tiles.pieces:
        at = piece.tiles
        scores = torch.matmul(queries[at], keys[piece.keys].float().permute(0, 2, 3, 1)) * attention.scale
        if attention.softcap is not None:
            scores = attention.softcap * tanh(scores / attention.softcap)
        if attention.alibi is not None:
            scores = scores - _distances(attention.alibi, piece, tiles, group)
        seen = piece.visible(attention, tiles)[:, None, :, None, :].expand(-1, 1, -1, group, -1)
        scores = scores.masked_fill(~seen.reshape(len(at), 1, TILE * group, PIECE), -math.inf)
        top = torch.maximum(largest[at], scores.amax(dim=-1))
        base = torch.where(top == -math.inf, 0.0, top)
        weights, old = exp(scores - base[..., None]), exp(largest[at] - base)
        total[at] = total[at] * old + weights.sum(dim=-1)
        found = torch.matmul(weights, values[piece.keys].float().transpose(1, 2))
        out[at] = out[at] * old[..., None] + found
        largest[at] = top
    if block.sinks is not None:
        sinks = block.sinks.view(1, -1, 1, group).expand(count, -1, TILE, -1).reshape(largest.shape)
        top = torch.maximum(largest, sinks)
        old = exp(largest - top)
        total, out = total * old + exp(sinks - top), out * old[..., None]
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    out = out.view(count, -1, TILE, group, dim).transpose(1, 2).reshape(count * TILE, -1, dim)
    return out[tiles.place]


def _distances(slopes: tuple[float, ...], piece: Piece, tiles: Tiles, group: int) -> Tensor:
    """How far queries are from keys, times each head's slope: (tiles, kv heads, TILE x group, PIECE)."""
    far = (tiles.positions[piece.tiles][:, :, None] - piece.key_positions[:, None, :]).abs().float()
    by_head = torch.tensor(slopes, device=far.device).view(1, -1, 1, group, 1)
    return (by_head * far[:, None, :, None, :]).reshape(len(far), -1, TILE * group, PIECE)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return x / (1 + exp(-x))
    if activation == "relu":
        return torch.relu(x)
    if activation == "relu2":
        return torch.square(torch.relu(x))
    if activation == "gelu":
        return x * (1 + by_value(torch.erf, x / math.sqrt(2))) / 2
    return x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))) / 2
