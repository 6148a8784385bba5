"""What a layer has beside attention and feed-forward, in torch: an input of its own, and experts beside it.

A layer's part of the input is computed where it is used, from the tokens: nothing is carried from layer to layer.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from kvarn.backends.torch.step import Step
from kvarn.backends.torch.streams.weights import PerLayerEmbeddingWeights
from kvarn.backends.torch.weights import (
    BlockWeights,
    ExpertWeights,
    Linear,
    NormWeights,
)
from kvarn.models.spec import FeedForward, MixtureOfExperts


class BlockOps(Protocol):
    """Of the operations of a device, those that are needed here."""

    def lookup(self, tokens: Tensor, token_ids: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, linear: Linear) -> Tensor: ...

    def normalise(self, x: Tensor, weights: NormWeights) -> Tensor: ...

    def linear_activate(self, x: Tensor, linear: Linear, ffn: FeedForward) -> Tensor: ...

    def experts(
        self, x: Tensor, weights: ExpertWeights, moe: MixtureOfExperts, step: Step, routed: Tensor | None = None
    ) -> Tensor: ...


def layer_part(
    embedded: Tensor, token_ids: Tensor, layer: int, weights: PerLayerEmbeddingWeights, ops: BlockOps
) -> Tensor:
    """One layer's input, (rows, length) in float32, of what enters the first layer."""
    length, width = weights.spec.length, embedded.shape[1]
    columns = slice(layer * length, (layer + 1) * length)
    rows = torch.where(token_ids < weights.spec.vocab_size, token_ids, 0)
    table = ops.lookup(weights.tokens[:, columns], rows).float() * math.sqrt(length)
    projected = ops.linear(embedded, Linear(weights.projection[columns])).float() / math.sqrt(width)
    return (table + ops.normalise(projected, weights.norm)) * math.sqrt(0.5)


def gated_part(x: Tensor, part: Tensor, block: BlockWeights, ops: BlockOps) -> Tensor:
    """What a layer's own input adds, as far as x lets it in."""
    assert block.per_layer is not None, "only a layer with an input of its own comes here"
    assert block.spec.per_layer is not None, "weights are those of the spec"
    ffn = FeedForward(block.spec.per_layer.length, block.spec.per_layer.activation, gated=False)
    gate = ops.linear_activate(x, block.per_layer.gate, ffn).float() * part
    return ops.normalise(ops.linear(gate.to(x.dtype), block.per_layer.projection), block.norms["post_norm"])


def add_laurel(x: Tensor, normed: Tensor, attended: Tensor, block: BlockWeights, ops: BlockOps) -> Tensor:
    """Add what attention gave and the low-rank map of the same input to the residual stream."""
    assert block.laurel is not None, "only a layer with a low-rank map comes here"
    narrow, wide = block.laurel
    mapped = ops.normalise(ops.linear(ops.linear(normed, narrow), wide), block.norms["laurel_post_norm"])
    return ((x.float() + attended.float() + normed.float() + mapped.float()) * math.sqrt(0.5)).to(x.dtype)


def add_beside(dense: Tensor, x: Tensor, block: BlockWeights, ops: BlockOps, step: Step) -> Tensor:
    """Add the experts of x to what the feed-forward made of it, each with a norm behind it."""
    moe, norms = block.spec.beside, block.norms
    assert moe is not None, "only a layer that has experts beside its feed-forward comes here"
    assert block.beside is not None, "weights are those of the spec"
    routed = ops.normalise(x, norms["ffn_gate_inp_norm"])
    experts = ops.experts(ops.normalise(x, norms["pre_ffw_norm_2"]), block.beside, moe, step, routed)
    return ops.normalise(dense, norms["post_ffw_norm_1"]) + ops.normalise(experts, norms["post_ffw_norm_2"])
