"""Layers that carry a state from token to token, in NumPy, one row after the other: the definition of their fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvarn.backends.batch import Batch
from kvarn.backends.reference.layers import Float32, Weights, activate, linear, normalise, sigmoid
from kvarn.models.recurrent import Recurrent, conv_channels, state_floats
from kvarn.models.spec import GatedDeltaNet, ShortConv

EPS = np.float32(1e-6)  # of unit vectors
Step = Callable[[int, Float32], None]  # compute a row and bring the state from before it to behind it


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """One block's recurrent sublayer and where its states are kept, (slots, floats)."""

    stem: str
    kind: Recurrent
    slots: Float32 | None


def recur(x: Float32, weights: Weights, layer: RecurrentLayer, batch: Batch) -> Float32:
    """Apply the recurrent sublayer of one block to all rows of a batch."""

    def scan(step: Step) -> None:
        for sequence in range(len(batch.context_lens)):
            _scan_sequence(step, np.zeros(state_floats(layer.kind), np.float32), sequence, batch, layer.slots)

    if isinstance(layer.kind, ShortConv):
        return _short_conv(x, weights, layer.stem, layer.kind, scan)
    return _gated_delta_net(x, weights, layer.stem, layer.kind, scan)


def _scan_sequence(step: Step, state: Float32, sequence: int, batch: Batch, slots: Float32 | None) -> None:
    """All rows of a sequence: its state is read before the first, and written behind the last and where it is saved."""
    begin, end = int(batch.row_starts[sequence]), int(batch.row_starts[sequence + 1])
    held = batch.states
    if held is None or slots is None:
        assert batch.positions[begin] == 0, "a sequence without a slot is computed in one piece"
        for row in range(begin, end):
            step(row, state)
        return
    if held.read[sequence] >= 0:
        state[:] = slots[held.read[sequence]]
    saved = dict(zip(held.saved_rows.tolist(), held.saved_slots.tolist(), strict=True))
    for row in range(begin, end):
        step(row, state)
        if row in saved:
            slots[saved[row]] = state
    slots[held.written[sequence]] = state


def _convolve(state: Float32, row: Float32, kernel: Float32) -> Float32:
    """Take a row in and return the products of the last rows with the kernel (channels, size), summed oldest first."""
    size = kernel.shape[1]
    window = np.concatenate([state[: (size - 1) * len(row)].reshape(size - 1, len(row)), row[None]])
    state[: (size - 1) * len(row)] = window[1:].reshape(-1)
    total: Float32 = window[0] * kernel[:, 0]
    for i in range(1, size):
        total = total + window[i] * kernel[:, i]
    return total


def _short_conv(x: Float32, weights: Weights, stem: str, layer: ShortConv, scan: Callable[[Step], None]) -> Float32:
    b, c, v = np.split(linear(x, weights, f"{stem}.shortconv.in_proj"), 3, axis=1)
    kernel, out = weights[f"{stem}.shortconv.conv.weight"], np.empty((len(x), layer.width), np.float32)

    def step(row: int, state: Float32) -> None:
        out[row] = c[row] * _convolve(state, b[row] * v[row], kernel)

    scan(step)
    return linear(out, weights, f"{stem}.shortconv.out_proj")


def _gated_delta_net(
    x: Float32, weights: Weights, stem: str, layer: GatedDeltaNet, scan: Callable[[Step], None]
) -> Float32:
    heads, keys = layer.num_value_heads, layer.num_key_heads * layer.key_dim
    qkv, kernel = linear(x, weights, f"{stem}.attn_qkv"), weights[f"{stem}.ssm_conv1d.weight"]
    alpha = linear(x, weights, f"{stem}.ssm_alpha") + weights[f"{stem}.ssm_dt.bias"]
    decay = np.exp(weights[f"{stem}.ssm_a"] * np.logaddexp(alpha, np.float32(0)))
    beta = sigmoid(linear(x, weights, f"{stem}.ssm_beta"))
    of_key = np.arange(heads) % layer.num_key_heads if layer.tiled else np.arange(heads) * layer.num_key_heads // heads
    out = np.empty((len(x), heads, layer.value_dim), np.float32)
    num_held = (layer.kernel - 1) * conv_channels(layer)

    def step(row: int, state: Float32) -> None:
        mixed = activate(_convolve(state, qkv[row], kernel), "silu")
        q, k = (_unit(part.reshape(-1, layer.key_dim))[of_key] for part in (mixed[:keys], mixed[keys : 2 * keys]))
        v = mixed[2 * keys :].reshape(heads, layer.value_dim)
        s = state[num_held:].reshape(heads, layer.key_dim, layer.value_dim)
        s *= decay[row, :, None, None]
        error = (v - np.einsum("hk,hkv->hv", k, s)) * beta[row, :, None]
        s += k[:, :, None] * error[:, None, :]
        out[row] = np.einsum("hk,hkv->hv", q / np.sqrt(np.float32(layer.key_dim)), s)

    scan(step)
    gate = linear(x, weights, f"{stem}.attn_gate")
    normed = normalise(out, weights, f"{stem}.ssm_norm", layer.norm).reshape(len(x), -1)
    return linear(normed * activate(gate, "silu"), weights, f"{stem}.ssm_out")


def _unit(x: Float32) -> Float32:
    y: Float32 = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + EPS)
    return y
