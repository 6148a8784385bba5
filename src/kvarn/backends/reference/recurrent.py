"""Layers that carry a state from token to token, in NumPy, one row after the other: the definition of their fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvarn.backends.batch import Batch
from kvarn.backends.reference.layers import Float32, Weights, activate, linear, normalise, sigmoid
from kvarn.models.recurrent import Recurrent, conv_channels, state_floats
from kvarn.models.state_layers import GatedDeltaNet, Mamba, Mamba2, ShortConv

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
    if isinstance(layer.kind, Mamba2):
        return _mamba2(x, weights, layer.stem, layer.kind, scan)
    if isinstance(layer.kind, Mamba):
        return _mamba(x, weights, layer.stem, layer.kind, scan)
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


def _mamba2(x: Float32, weights: Weights, stem: str, layer: Mamba2, scan: Callable[[Step], None]) -> Float32:
    heads, channels = layer.num_heads, conv_channels(layer)
    projected = linear(x, weights, f"{stem}.ssm_in", layer.bias)
    z, y, dt = np.split(projected, [layer.values, layer.values + channels], axis=1)
    steps = np.logaddexp(dt + weights[f"{stem}.ssm_dt.bias"], np.float32(0))
    steps = np.clip(steps, np.float32(layer.min_step), None if layer.max_step is None else np.float32(layer.max_step))
    decay, d = np.exp(weights[f"{stem}.ssm_a"] * steps), weights[f"{stem}.ssm_d"]
    kernel, bias = weights[f"{stem}.ssm_conv1d.weight"], _conv_bias(weights, stem, layer.conv_bias)
    of_group = np.arange(heads) * layer.num_groups // heads
    out, num_held = np.empty((len(x), heads, layer.head_dim), np.float32), (layer.kernel - 1) * channels

    def step(row: int, state: Float32) -> None:
        mixed = activate(_convolve(state, y[row], kernel) + bias, "silu")
        v = mixed[: layer.values].reshape(heads, layer.head_dim)
        b, c = mixed[layer.values :].reshape(2, layer.num_groups, layer.state_dim)[:, of_group]
        s = state[num_held:].reshape(heads, layer.state_dim, layer.head_dim)
        s *= decay[row, :, None, None]
        s += b[:, :, None] * (v * steps[row, :, None])[:, None, :]
        out[row] = np.einsum("hk,hkv->hv", c, s) + d[:, None] * v

    scan(step)
    gate, found = activate(z, "silu"), out.reshape(len(x), -1)
    found = found if layer.norm_first else found * gate
    if layer.norm is not None:
        grouped = found.reshape(len(x), layer.num_groups, -1)
        scale = 1 / np.sqrt((grouped * grouped).mean(axis=-1, keepdims=True) + np.float32(layer.norm.eps))
        found = (grouped * scale).reshape(len(x), -1) * weights[f"{stem}.ssm_norm.weight"]
    return linear(found * gate if layer.norm_first else found, weights, f"{stem}.ssm_out", layer.output_bias)


def _mamba(x: Float32, weights: Weights, stem: str, layer: Mamba, scan: Callable[[Step], None]) -> Float32:
    y, z = np.split(linear(x, weights, f"{stem}.ssm_in", layer.bias), 2, axis=1)
    kernel, bias = weights[f"{stem}.ssm_conv1d.weight"], _conv_bias(weights, stem, layer.conv_bias)
    a, d = weights[f"{stem}.ssm_a"], weights[f"{stem}.ssm_d"]
    out, num_held = np.empty((len(x), layer.width), np.float32), (layer.kernel - 1) * layer.width

    def step(row: int, state: Float32) -> None:
        v = activate(_convolve(state, y[row], kernel) + bias, "silu")
        parts = np.split(linear(v, weights, f"{stem}.ssm_x"), [layer.rank, layer.rank + layer.state_dim])
        if layer.parameter_norm_eps is not None:
            eps = np.float32(layer.parameter_norm_eps)
            parts = [part / np.sqrt((part * part).mean() + eps) for part in parts]
        steps = np.logaddexp(linear(parts[0], weights, f"{stem}.ssm_dt", bias=True), np.float32(0))
        s = state[num_held:].reshape(layer.width, layer.state_dim)
        s *= np.exp(a * steps[:, None])
        s += (v * steps)[:, None] * parts[1]
        out[row] = s @ parts[2] + d * v

    scan(step)
    return linear(out * activate(z, "silu"), weights, f"{stem}.ssm_out", layer.bias)


def _conv_bias(weights: Weights, stem: str, has_bias: bool) -> Float32:
    return weights[f"{stem}.ssm_conv1d.bias"] if has_bias else np.zeros(1, np.float32)


def _unit(x: Float32) -> Float32:
    y: Float32 = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + EPS)
    return y
