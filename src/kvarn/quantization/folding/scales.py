"""Scales for folds. AWQ: a power of the mean input, the one whose rounded outputs are nearest to the source's.

SmoothQuant: the largest input against the largest weight of each channel, at a fixed strength.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvarn.backends.native import _native
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource
from kvarn.quantization.blocks import FLOATS, requantized
from kvarn.quantization.folding.folds import Float32, Fold

POWERS = tuple(round(0.05 * step, 2) for step in range(20))  # of AWQ
SMOOTHING = 0.85  # of SmoothQuant: 1 moves all of an input's size into the weights
SMALLEST = 1e-4
MAX_ROWS = 128  # of a matrix, evenly spaced, whose outputs AWQ compares


def smoothquant_scales(weights: WeightSource, fold: Fold, largest_inputs: Float32) -> Float32 | None:
    """max|x|^a / max|w|^(1 - a); only where a norm writes the channels."""
    if fold.input not in ("qkv", "ffn_in"):
        return None
    largest = np.max([np.abs(weights.array(name)).max(axis=0) for name in fold.readers], axis=0)
    powers = np.maximum(largest_inputs, SMALLEST) ** SMOOTHING
    return _centred(powers / np.maximum(largest, SMALLEST) ** (1 - SMOOTHING))


class AwqSearch:
    """The power of the mean input under which the rounded outputs of some rows change least."""

    def __init__(
        self, weights: WeightSource, types: Mapping[str, TensorType], team: _native.ThreadTeam, *, has_imatrix: bool
    ) -> None:
        self._weights, self._types, self._team, self._has_imatrix = weights, types, team, has_imatrix

    def scales(self, fold: Fold, mean_inputs: Float32, moments: Float32) -> Float32 | None:
        """mean|x|^a for the best a; None where none helps. moments: (columns, columns), the mean of x x^T."""
        readers = [name for name in fold.readers if self._types[name] not in FLOATS]
        samples = [(_sampled(self._weights, name), self._types[name]) for name in readers]
        mean = np.maximum(fold.of_channels(mean_inputs), SMALLEST)
        choices = [_centred((mean**power).astype(np.float32)) for power in POWERS]
        errors = [self._all_errors(samples, fold.of_columns(scales), moments) for scales in choices]
        best = int(np.argmin(errors))
        return None if best == 0 else choices[best]

    def _all_errors(self, samples: list[tuple[Float32, TensorType]], scales: Float32, moments: Float32) -> float:
        return sum((self._error(values, type, scales, moments) for values, type in samples), 0.0)

    def _error(self, values: Float32, type: TensorType, scales: Float32, moments: Float32) -> float:
        """Squares of what the outputs change by when the scaled matrix is rounded."""
        squares = (moments.diagonal() / np.square(scales)).astype(np.float32)
        importance = squares if self._has_imatrix else None
        scaled = np.ascontiguousarray(values * scales)
        info = TensorInfo("sample", TensorType.F32, scaled.shape)
        pieces = requantized(scaled.reshape(-1).view(np.uint8), info, type, importance, self._team)
        change = dequantize(np.concatenate(list(pieces)), type, scaled.shape) / scales - values
        return float(((change @ moments) * change).sum(dtype=np.float64))


def _centred(scales: Float32) -> Float32:
    centred: Float32 = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
    return centred


def _sampled(weights: WeightSource, name: str) -> Float32:
    values = weights.array(name)
    wanted = min(len(values), MAX_ROWS)
    return values[(2 * np.arange(wanted) + 1) * len(values) // (2 * wanted)].astype(np.float32)
