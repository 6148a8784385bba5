"""Operations on a rank's share of the heads and columns: another Ops computes, sums over the ranks complete it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvarn.backends.batch import Batch
from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.cuda.quantized.pack import QuantizedMatrix
from kvarn.backends.torch.layers import Ops
from kvarn.backends.torch.parallel.groups import Ranks
from kvarn.backends.torch.parallel.shards import kv_replicas
from kvarn.backends.torch.plain import PlainOps
from kvarn.backends.torch.rope import RopeTable
from kvarn.backends.torch.step import PagedTiles, Step, Tiles
from kvarn.backends.torch.weights import (
    BlockWeights,
    ExpertWeights,
    FeedForwardWeights,
    Linear,
    ModelWeights,
    NormWeights,
)
from kvarn.models.spec import FeedForward, MixtureOfExperts, ModelSpec


class ShardedOps:
    """Column-parallel products are a rank's own; row-parallel ones (attention's output, down, experts) are summed."""

    can_be_captured = False
    reads_packed = False

    def __init__(self, inner: PlainOps, ranks: Ranks, spec: ModelSpec) -> None:
        """spec is that of the whole model."""
        self._inner: Ops = inner
        self._ranks = ranks
        self._tokens = ranks.place.tokens(spec.vocab_size)
        self._vocab_size = spec.vocab_size
        own = [spec.blocks[layer] for layer in ranks.place.layers(len(spec.blocks))]
        self._replicas = [kv_replicas(block.attention, ranks.place.shape) for block in own]
        self._partial: frozenset[int] = frozenset()  # ids of the matrices whose products are summed
        inner.all_heads = self._all_heads

    def prepare(self, weights: ModelWeights) -> None:
        inner = [block.feed_forward for block in weights.blocks]
        downs = [one.down for one in inner if isinstance(one, FeedForwardWeights)]
        self._partial = frozenset(id(linear) for linear in [*(block.output for block in weights.blocks), *downs])
        self._inner.prepare(weights)

    def row_multiple(self, num_rows: int) -> int:
        return self._inner.row_multiple(num_rows)

    def plan(self, batch: Batch, cache: DeviceCache) -> Tiles | PagedTiles:
        return self._inner.plan(batch, cache)

    def lookup(self, tokens: Tensor | QuantizedMatrix, token_ids: Tensor) -> Tensor:
        """Every rank's own tokens, and zeros for the others'."""
        assert isinstance(tokens, Tensor), "ranks have dense matrices"
        own = token_ids - self._tokens.start
        is_own = (own >= 0) & (own < len(self._tokens))
        found = tokens[torch.where(is_own, own, 0)]
        return self._ranks.tensor.sum(found.masked_fill(~is_own[:, None], 0))

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        y = self._inner.linear(x, linear)
        return self._ranks.tensor.sum(y) if id(linear) in self._partial else y

    def logits(self, x: Tensor, head: Linear) -> Tensor:
        """Of the whole vocabulary, on every rank."""
        own = self._inner.logits(x, head)
        longest = -(-self._vocab_size // self._ranks.tensor.size)
        padded = torch.nn.functional.pad(own, (0, longest - own.shape[1]))
        return torch.cat(self._ranks.tensor.gather(padded), dim=1)[:, : self._vocab_size]

    def most_confident(self, logits: Tensor, banned: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._inner.most_confident(logits, banned)

    def add_linear(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        return residual + self.linear(x, linear)

    def normalise(self, x: Tensor, weights: NormWeights) -> Tensor:
        return self._inner.normalise(x, weights)

    def linear_activate(self, x: Tensor, linear: Linear, ffn: FeedForward) -> Tensor:
        return self._inner.linear_activate(x, linear, ffn)

    def attend(
        self, qkv: Tensor, block: BlockWeights, rope: RopeTable | None, step: Step, cache: DeviceCache
    ) -> Tensor:
        return self._inner.attend(qkv, block, rope, step, cache)

    def attend_latent(
        self, x: Tensor, block: BlockWeights, rope: RopeTable | None, step: Step, cache: DeviceCache
    ) -> Tensor | None:
        return self._inner.attend_latent(x, block, rope, step, cache)

    def recur(self, x: Tensor, block: BlockWeights, step: Step, states: Tensor | None) -> Tensor:
        return self._inner.recur(x, block, step, states)

    def experts(
        self, x: Tensor, weights: ExpertWeights, moe: MixtureOfExperts, step: Step, routed: Tensor | None = None
    ) -> Tensor:
        return self._ranks.tensor.sum(self._inner.experts(x, weights, moe, step, routed))

    def _all_heads(self, scores: Tensor, block: BlockWeights) -> tuple[Tensor, slice]:
        """The largest over the copies of each KV head: every copy meets its own query heads only."""
        replicas, part = self._replicas[block.index], self._ranks.place.part
        found = torch.cat(self._ranks.tensor.gather(scores))
        if replicas > 1:
            found = found.view(-1, replicas, found.shape[1]).amax(dim=1)
        first = part // replicas * len(scores)
        return found, slice(first, first + len(scores))
