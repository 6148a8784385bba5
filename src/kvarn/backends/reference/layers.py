"""The layers of a model in NumPy, float32, one function each: what the fields of models/spec.py mean.

x is always (rows, width). Weights are looked up under their canonical names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvarn.backends.adapted import AdaptedWeights
from kvarn.models.spec import Activation, FeedForward, InputEmbedding, MixtureOfExperts, Norm

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Weights = Mapping[str, Float32]

_erf = np.frompyfunc(math.erf, 1, 1)


def linear(x: Float32, weights: Weights, name: str, bias: bool = False) -> Float32:
    """Multiply by a matrix (out, in) and add its bias."""
    y = x @ weights[f"{name}.weight"].T
    if isinstance(weights, AdaptedWeights):
        y = weights.added(name, x, y)
    return y + weights[f"{name}.bias"] if bias else y


def normalise(x: Float32, weights: Weights, name: str, norm: Norm) -> Float32:
    """Normalise the last axis."""
    eps = np.float32(norm.eps)
    if norm.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    y = unit_rms(x, eps) * weights[f"{name}.weight"]
    return y + weights[f"{name}.bias"] if norm.has_bias else y


def unit_rms(x: Float32, eps: np.float32) -> Float32:
    """Divide the last axis by the root of its mean square."""
    y: Float32 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return y


def activate(x: Float32, activation: Activation) -> Float32:
    """Apply an activation function."""
    y: Float32
    if activation == "silu":
        y = x / (1 + _exp(-x))
    elif activation == "gelu":
        y = x * (1 + _erf(x / math.sqrt(2)).astype(np.float32)) / 2
    elif activation == "relu":
        y = np.maximum(x, np.float32(0))
    elif activation == "relu2":
        y = np.maximum(x, np.float32(0)) ** 2
    else:
        y = x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))) / 2
    return y


def gated(gate: Float32, up: Float32, activation: Activation) -> Float32:
    """Combine the two first products of a gated feed-forward."""
    if activation != "swiglu_oai":
        return activate(gate, activation) * up
    gate = np.minimum(gate, np.float32(7))
    with np.errstate(over="ignore"):
        return (np.clip(up, -7, 7) + 1) * (gate * sigmoid(np.float32(1.702) * gate))


def sigmoid(x: Float32) -> Float32:
    """Map to (0, 1)."""
    y: Float32 = np.reciprocal(1 + _exp(-x))
    return y


def _exp(x: Float32) -> Float32:
    """Beyond what a float holds it is infinite, and the quotient with it 0."""
    with np.errstate(over="ignore"):
        y: Float32 = np.exp(x)
    return y


def embed(tokens: Int32, positions: Int32, weights: Weights, embedding: InputEmbedding) -> Float32:
    """Turn tokens into the first state of the residual stream."""
    table = weights["token_embd.weight"]
    segments, tokens = np.divmod(tokens, len(table))  # all 0 but in the second of two texts
    x = table[tokens]
    if isinstance(weights, AdaptedWeights):
        x = weights.added_to_embedding(tokens, x)
    x = x * np.float32(embedding.scale)
    if embedding.positions is not None:
        x = x + weights["position_embd.weight"][positions]
    if embedding.token_types:
        x = x + weights["token_types.weight"][segments]
    if embedding.norm is not None:
        x = normalise(x, weights, "token_embd_norm", embedding.norm)
    return x


def feed_forward(x: Float32, weights: Weights, stem: str, ffn: FeedForward | MixtureOfExperts) -> Float32:
    """Apply the feed-forward sublayer of block `stem`."""
    if isinstance(ffn, MixtureOfExperts):
        return mixture_of_experts(x, x, weights, stem, ffn)
    up = linear(x, weights, f"{stem}.ffn_up", ffn.bias)
    if ffn.gated:
        gate = linear(x, weights, f"{stem}.ffn_gate", ffn.bias)
        hidden = gated(gate if ffn.gate_cutoff is None else cut_off(gate, ffn.gate_cutoff), up, ffn.activation)
    else:
        hidden = activate(up, ffn.activation)
    return linear(hidden, weights, f"{stem}.ffn_down", ffn.bias)


def cut_off(gate: Float32, deviations: float) -> Float32:
    """What of each row exceeds its mean by so many standard deviations."""
    mean, deviation = gate.mean(axis=-1, keepdims=True), gate.std(axis=-1, keepdims=True)
    y: Float32 = np.maximum(gate - (mean + deviation * np.float32(deviations)), np.float32(0))
    return y


def softcap(x: Float32, cap: float | None) -> Float32:
    """Limit values smoothly to (-cap, cap)."""
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def softmax(x: Float32) -> Float32:
    """Normalise the last axis to probabilities."""
    e: Float32 = np.exp(x - x.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


def route(x: Float32, weights: Weights, stem: str, moe: MixtureOfExperts) -> tuple[npt.NDArray[np.intp], Float32]:
    """Choose the experts of every row, (rows, num_active), and give every expert its share of them, (rows, experts)."""
    logits = linear(x, weights, f"{stem}.ffn_gate_inp", moe.router_bias)
    if moe.mixer_margin is not None:
        return _mix_sparsely(logits, moe.num_active, np.float32(moe.mixer_margin))
    p = softmax(logits) if moe.scoring == "softmax" else sigmoid(logits)
    choice = p + weights[f"{stem}.exp_probs_b.bias"] if moe.selection_bias else p
    if moe.groups is not None:
        members = choice.reshape(len(x), moe.groups.count, -1)
        sums = np.sort(members, axis=-1)[..., -moe.groups.num_judged :].sum(axis=-1)
        kept = np.argsort(-sums, axis=-1, kind="stable")[:, : moe.groups.num_active, None]
        is_kept = (np.arange(moe.groups.count) == kept).any(axis=1)
        choice = np.where(is_kept[..., None], members, np.float32(-np.inf)).reshape(choice.shape)
    chosen = np.argsort(-choice, axis=-1, kind="stable")[:, : moe.num_active]  # ties to the lower index
    share = np.zeros_like(p)
    np.put_along_axis(share, chosen, np.take_along_axis(p, chosen, axis=-1), axis=-1)
    if moe.renormalise:
        share /= share.sum(axis=-1, keepdims=True)
    if moe.expert_scale:
        share *= weights[f"{stem}.ffn_down_exps.scale"]
    return chosen, share * np.float32(moe.scale)


def _mix_sparsely(logits: Float32, num_active: int, margin: np.float32) -> tuple[npt.NDArray[np.intp], Float32]:
    """Choose as mixer_margin says."""
    left, share, chosen = logits.copy(), np.zeros_like(logits), []
    for _ in range(num_active):
        best = left.argmax(axis=-1)[:, None]
        largest = np.take_along_axis(left, best, axis=-1)
        is_far = (largest - logits) / np.maximum(np.abs(logits), largest) > margin
        p = softmax(np.where(is_far, np.float32(-np.inf), left))
        np.put_along_axis(share, best, np.take_along_axis(p, best, axis=-1), axis=-1)
        np.put_along_axis(left, best, np.float32(-np.inf), axis=-1)
        chosen.append(best)
    return np.concatenate(chosen, axis=-1), share


def mixture_of_experts(x: Float32, routed: Float32, weights: Weights, stem: str, moe: MixtureOfExperts) -> Float32:
    """Apply the experts to x that the router chooses by `routed`."""
    chosen, share = route(routed, weights, stem, moe)
    names = ("gate", "up", "down") if moe.gated else ("up", "down")
    matrices = {name: weights[f"{stem}.ffn_{name}_exps.weight"] for name in names}
    biases = {name: weights[f"{stem}.ffn_{name}_exps.bias"] if moe.expert_bias else None for name in names}

    def product(name: str, expert: int, rows: Float32) -> Float32:
        y: Float32 = rows @ matrices[name][expert].T
        bias = biases[name]
        return y if bias is None else y + bias[expert]

    out = np.zeros_like(x)
    for expert in np.unique(chosen):
        rows = np.flatnonzero((chosen == expert).any(axis=-1))
        weight: Float32 = share[rows, expert, None]
        read, kind = x[rows], moe.activation
        if moe.weighs_input:
            weight, read = np.ones_like(weight), weight * read
        up = product("up", expert, read)
        hidden = gated(product("gate", expert, read), up, kind) if moe.gated else activate(up, kind)
        out[rows] += weight * product("down", expert, hidden)
    out = out if moe.shared is None else out + _shared_expert(x, weights, stem, moe)
    return out + weights[f"{stem}.ffn_exps.bias"] if moe.output_bias else out


def _shared_expert(x: Float32, weights: Weights, stem: str, moe: MixtureOfExperts) -> Float32:
    assert moe.shared is not None, "only a mixture that has one computes it"
    up = linear(x, weights, f"{stem}.ffn_up_shexp")
    if moe.gated:
        hidden = gated(linear(x, weights, f"{stem}.ffn_gate_shexp"), up, moe.activation)
    else:
        hidden = activate(up, moe.activation)
    out = linear(hidden, weights, f"{stem}.ffn_down_shexp")
    if not moe.shared.gate:
        return out
    return out * sigmoid(x @ weights[f"{stem}.ffn_gate_inp_shexp.weight"])[:, None]
