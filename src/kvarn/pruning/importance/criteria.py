"""How much each part of a model matters, by several criteria. Pure arithmetic over weights and statistics.

A part is a layer, a group of heads or a channel; larger scores stay. Statistics are of the inputs of ffn_down and
attn_output, so that what a part adds to the residual stream is W x of its columns W and inputs x:

    activation  rms of what it adds: sqrt(trace(W E[x x^T] W^T)); |column| * rms(x) for a channel (Wanda, structured)
    flap        its variance instead of its square (FLAP); what is constant could be a bias
    magnitude   the largest |weight| of the part
    l2          the product of the norms of its pieces of each matrix

Whole layers are scored by block influence instead of the first two (ShortGPT): 1 - cos of what goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

CRITERIA = ("influence", "activation", "flap", "magnitude", "l2", "random")
DATA_FREE = ("magnitude", "l2", "random")  # look at no activations, and are warned of


def block_influence(states: Float32) -> Float64:
    """1 - mean cosine of what a layer reads and what it leaves; states (layers + 1, tokens, width)."""
    x = states.astype(np.float64)
    x /= np.maximum(np.linalg.norm(x, axis=2, keepdims=True), 1e-30)
    similarity: Float64 = (x[:-1] * x[1:]).sum(axis=2).mean(axis=1)
    return 1.0 - similarity


def contribution(columns: Float32, moments: Float32, size: int) -> Float64:
    """sqrt(trace(W M W^T)) for each run of `size` columns: of their weights W and their block M of the moments."""
    count = columns.shape[1] // size
    found = np.empty(count)
    for part in range(count):
        span = slice(part * size, (part + 1) * size)
        weights = columns[:, span].astype(np.float64)
        found[part] = np.sqrt(max(0.0, float(((weights @ moments[span, span]) * weights).sum())))
    return found


def channel_contribution(columns: Float32, mean_squares: Float32) -> Float64:
    """The same for single columns: |column| * rms(x)."""
    norms = np.square(columns.astype(np.float64)).sum(axis=0)
    found: Float64 = np.sqrt(norms * np.maximum(mean_squares.astype(np.float64), 0.0))
    return found


def largest_weight(pieces: Sequence[Float32]) -> Float64:
    """pieces: what each part has of each matrix, (parts, weights)."""
    found: Float64 = np.stack([np.abs(piece).max(axis=1) for piece in pieces]).max(axis=0).astype(np.float64)
    return found


def norm_product(pieces: Sequence[Float32]) -> Float64:
    """The logarithm of the product of norms, which orders as the product does and cannot overflow."""
    norms = [np.sqrt(np.square(piece.astype(np.float64)).sum(axis=1)) for piece in pieces]
    found: Float64 = np.log(np.maximum(np.stack(norms), 1e-300)).sum(axis=0)
    return found


def best(scores: Float64, count: int) -> tuple[int, ...]:
    """The numbers of the largest scores, ascending; of equal ones the first."""
    order = np.argsort(-scores, kind="stable")[:count]
    return tuple(int(number) for number in np.sort(order))
