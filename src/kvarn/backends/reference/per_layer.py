"""What a layer has beside attention and feed-forward in NumPy: experts beside it, and an input of its own."""

from __future__ import annotations

import math

import numpy as np

from kvarn.backends.reference.layers import (
    Float32,
    Int32,
    Weights,
    activate,
    feed_forward,
    linear,
    mixture_of_experts,
    normalise,
)
from kvarn.models.spec import Block, ModelSpec, Norm


def per_layer_parts(x: Float32, tokens: Int32, weights: Weights, spec: ModelSpec) -> Float32:
    """The inputs of all layers, (rows, layers, length); of length 0 where they have none."""
    embedding, num_layers = spec.embedding.per_layer, len(spec.blocks)
    if embedding is None:
        return np.empty((len(x), num_layers, 0), np.float32)
    rows = np.where(tokens < embedding.vocab_size, tokens, 0)
    table = weights["per_layer_token_embd.weight"][rows].reshape(len(x), num_layers, -1)
    projected = linear(x, weights, "per_layer_model_proj").reshape(table.shape) * np.float32(1 / math.sqrt(spec.width))
    projected = normalise(projected, weights, "per_layer_proj_norm", embedding.norm)
    return (table * np.float32(math.sqrt(embedding.length)) + projected) * np.float32(math.sqrt(0.5))


def per_layer_input(x: Float32, part: Float32, weights: Weights, stem: str, block: Block) -> Float32:
    """What the layer's own input adds, as far as x lets it in; nothing where it has none."""
    if block.per_layer is None:
        return np.zeros_like(x)
    gate = activate(linear(x, weights, f"{stem}.inp_gate"), block.per_layer.activation)
    return normalise(linear(gate * part, weights, f"{stem}.proj"), weights, f"{stem}.post_norm", block.norm)


def add_laurel(x: Float32, normed: Float32, weights: Weights, stem: str, norm: Norm) -> Float32:
    """Add to x, where what attention gave is already, the low-rank map of what it read."""
    mapped = linear(linear(normed, weights, f"{stem}.laurel_l"), weights, f"{stem}.laurel_r")
    laurel = normed + normalise(mapped, weights, f"{stem}.laurel_post_norm", norm)
    return (x + laurel) * np.float32(math.sqrt(0.5))


def beside_experts(x: Float32, normed: Float32, weights: Weights, stem: str, block: Block) -> Float32:
    """A feed-forward of `normed` and experts of x, each with a norm behind it."""
    assert block.beside is not None, "only a block that has experts beside its feed-forward comes here"

    def norm(y: Float32, name: str) -> Float32:
        return normalise(y, weights, f"{stem}.{name}", block.norm)

    dense = feed_forward(normed, weights, stem, block.feed_forward)
    read, routed = norm(x, "pre_ffw_norm_2"), norm(x, "ffn_gate_inp_norm")
    experts = mixture_of_experts(read, routed, weights, stem, block.beside)
    return norm(dense, "post_ffw_norm_1") + norm(experts, "post_ffw_norm_2")
