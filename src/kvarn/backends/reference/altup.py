"""Alternating updates in NumPy: several residual streams, a layer computes one of them. x is (rows, streams, width)."""

from __future__ import annotations

import numpy as np

from kvarn.backends.reference.layers import Float32, Weights, linear, normalise
from kvarn.models.residual import AltUp

LEAST = np.float32(1e-5)  # of a mean square that is divided by


def split_streams(x: Float32, weights: Weights, altup: AltUp) -> Float32:
    """The streams of what is embedded."""
    others = [_as_long(x @ matrix.T, x) for matrix in weights["altup_proj.weight"]]
    assert len(others) == altup.streams - 1, "weights are those of the spec"
    return np.stack([x, *others], axis=1)


def merge_streams(x: Float32, weights: Weights, altup: AltUp) -> Float32:
    """What the output norm reads."""
    first, matrices = x[:, 0], weights["altup_unembd_proj.weight"]
    others = [_as_long(x[:, i + 1] @ matrices[i].T, first) for i in range(altup.streams - 1)]
    y: Float32 = np.stack([first, *others]).mean(axis=0, dtype=np.float32)
    return y


def predict(x: Float32, weights: Weights, stem: str, altup: AltUp) -> Float32:
    """Guess what the layer makes of all streams, from its input."""
    modes = _modes(x[:, altup.active], weights, stem, altup)
    mixing = linear(modes, weights, f"{stem}.altup_predict_coef").reshape(len(x), altup.streams, altup.streams)
    mixed: Float32 = np.einsum("rij,rjw->riw", mixing, x)
    return x + mixed


def correct(guessed: Float32, computed: Float32, weights: Weights, stem: str, altup: AltUp) -> Float32:
    """Move all streams by what the guess of the active one was wrong."""
    share = linear(_modes(computed, weights, stem, altup), weights, f"{stem}.altup_correct_coef") + np.float32(1)
    return guessed + share[..., None] * (computed - guessed[:, altup.active])[:, None]


def scaled_active(x: Float32, weights: Weights, stem: str, altup: AltUp) -> Float32:
    """What lets the layer's own input in."""
    active = x[:, altup.active]
    return active * weights[f"{stem}.altup_correct_scale.weight"] if altup.correct_scale else active


def _modes(x: Float32, weights: Weights, stem: str, altup: AltUp) -> Float32:
    normed = normalise(x, weights, f"{stem}.altup_router_norm", altup.norm) * np.float32(1 / x.shape[-1])
    y: Float32 = np.tanh(linear(normed, weights, f"{stem}.altup_router"))
    return y


def _as_long(x: Float32, wanted: Float32) -> Float32:
    length = np.sqrt(np.maximum(np.mean(x * x, axis=-1, keepdims=True), LEAST))
    y: Float32 = x * np.sqrt(np.mean(wanted * wanted, axis=-1, keepdims=True)) / length
    return y
