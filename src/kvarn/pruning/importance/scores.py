"""The scores of every part of one source by one criterion, made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvarn.formats.weights import WeightSource
from kvarn.models.spec import ModelSpec
from kvarn.pruning.importance.activations import Activations
from kvarn.pruning.importance.criteria import (
    Float32,
    Float64,
    block_influence,
    channel_contribution,
    contribution,
    largest_weight,
    norm_product,
)

SEED = 18


@dataclass(frozen=True, slots=True)
class PartScores:
    """Of one source, on one text. states: as the probe has them."""

    weights: WeightSource
    spec: ModelSpec
    activations: Activations
    states: Float32
    by: str
    seed: int = SEED
    made: dict[tuple[str, int], Float64] = field(default_factory=dict, repr=False)

    def layers(self) -> Float64:
        """One score for each layer."""
        if self.by == "random":
            return self._random(0, len(self.spec.blocks))
        if self.by not in ("magnitude", "l2"):
            return block_influence(self.states)
        found = []
        for layer in range(len(self.spec.blocks)):
            pieces = [values.reshape(1, -1) for values in self._matrices(layer)]
            found.append(largest_weight(pieces) if self.by == "magnitude" else norm_product(pieces))
        return np.concatenate(found)

    def channels(self, layer: int) -> Float64:
        """One score for each channel of a feed-forward."""
        return self._once(("channels", layer), self._channels)

    def heads(self, layer: int) -> Float64:
        """One score for each query head."""
        return self._once(("heads", layer), self._heads)

    def groups(self, layer: int) -> Float64:
        """One score for each KV head with its query heads."""
        return self._once(("groups", layer), self._groups)

    def _once(self, key: tuple[str, int], make: object) -> Float64:
        if key not in self.made:
            assert callable(make)
            self.made[key] = make(key[1])
        return self.made[key]

    def _channels(self, layer: int) -> Float64:
        down = self._array(layer, "ffn_down")
        if self.by == "random":
            return self._random(1 + layer, down.shape[1])
        if self.by in ("magnitude", "l2"):
            rows = [self._array(layer, kind) for kind in ("ffn_gate", "ffn_up") if self._has(layer, kind)]
            return self._of_weights([*rows, down.T])
        found = self.activations[layer, "ffn_down"]
        squares = found.squares - np.square(found.mean) if self.by == "flap" else found.squares
        return channel_contribution(down, squares)

    def _heads(self, layer: int) -> Float64:
        attention = self.spec.blocks[layer].attention
        if self.by == "random":
            return self._random(10_000 + layer, attention.num_heads)
        if self.by in ("magnitude", "l2"):
            return self._of_weights(self._head_pieces(layer, attention.num_heads))
        return self._added(layer, attention.head_dim)

    def _groups(self, layer: int) -> Float64:
        attention = self.spec.blocks[layer].attention
        shared = attention.num_heads // attention.num_kv_heads
        if self.by == "random":
            return self._random(20_000 + layer, attention.num_kv_heads)
        if self.by not in ("magnitude", "l2"):
            return self._added(layer, attention.head_dim * shared)
        kv = [self._array(layer, kind).reshape(attention.num_kv_heads, -1) for kind in ("attn_k", "attn_v")]
        return self._of_weights([*self._head_pieces(layer, attention.num_kv_heads), *kv])

    def _head_pieces(self, layer: int, parts: int) -> list[Float32]:
        output = self._array(layer, "attn_output")
        return [self._array(layer, "attn_q").reshape(parts, -1), output.T.reshape(parts, -1)]

    def _added(self, layer: int, columns: int) -> Float64:
        found = self.activations[layer, "attention_output"]
        moments = found.covariance if self.by == "flap" else found.moments
        return contribution(self._array(layer, "attn_output"), moments, columns)

    def _of_weights(self, pieces: list[Float32]) -> Float64:
        return largest_weight(pieces) if self.by == "magnitude" else norm_product(pieces)

    def _random(self, stream: int, count: int) -> Float64:
        return np.random.default_rng((self.seed, stream)).random(count)

    def _has(self, layer: int, kind: str) -> bool:
        return f"blk.{layer}.{kind}.weight" in self.weights.tensors

    def _array(self, layer: int, kind: str) -> Float32:
        return self.weights.array(f"blk.{layer}.{kind}.weight")

    def _matrices(self, layer: int) -> Iterator[Float32]:
        prefix = f"blk.{layer}."
        names = [n for n, info in self.weights.tensors.items() if n.startswith(prefix) and len(info.shape) == 2]
        yield from map(self.weights.array, names)
