"""Types a tensor may get, and the weighted error each makes of it, estimated on some of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvarn.backends.native import _native
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource
from kvarn.quantization.blocks import Float32, requantized

T = TensorType
MAX_ROWS = 256  # of a matrix, evenly spaced: enough for its error
BLOCK_TYPES: Final = (T.Q2_K, T.Q3_K, T.IQ4_NL, T.Q4_0, T.Q4_K, T.Q4_1, T.Q5_K, T.Q5_0, T.Q5_1, T.Q6_K, T.Q8_0)


@dataclass(frozen=True, slots=True)
class TypeCandidate:
    """error: squares of what the type changes, weighed by importance, over those of the values themselves."""

    type: TensorType
    num_bytes: int
    error: float


def fitting_types(info: TensorInfo) -> tuple[TensorType, ...]:
    """The types whose blocks fit a tensor's rows, smallest first, and the one it has; F16 for F32."""
    columns, stored = info.shape[-1], T.F16 if info.type is T.F32 else info.type
    fitting = [type for type in BLOCK_TYPES if columns % type.block_values == 0 and type is not stored]
    return (*sorted(fitting, key=lambda type: type.num_bytes(256)), stored)


def candidates(
    weights: WeightSource, info: TensorInfo, importance: Float32 | None, team: _native.ThreadTeam
) -> list[TypeCandidate]:
    """Every type a tensor may get with its error, smallest first, without those that another one beats."""
    sample, values, weighed = _sampled(weights, info, importance)
    column_weight = np.ones(info.shape[-1], np.float32) if weighed is None else weighed[..., None, :]
    total = float((column_weight * values * values).sum(dtype=np.float64))
    found: list[TypeCandidate] = []
    for type in fitting_types(info):
        error = 0.0
        if type is not info.type and total > 0:
            raw = np.concatenate(list(requantized(sample.raw, sample.info, type, weighed, team)))
            change = dequantize(raw, type, values.shape) - values
            error = float((column_weight * change * change).sum(dtype=np.float64)) / total
        found.append(TypeCandidate(type, type.num_bytes(info.num_values), error))
    found.sort(key=lambda candidate: (candidate.num_bytes, candidate.error))
    return [new for at, new in enumerate(found) if all(new.error < old.error for old in found[:at])]


@dataclass(frozen=True, slots=True)
class _Sample:
    raw: npt.NDArray[np.uint8]
    info: TensorInfo


def _sampled(
    weights: WeightSource, info: TensorInfo, importance: Float32 | None
) -> tuple[_Sample, Float32, Float32 | None]:
    """Some rows of a tensor, as a tensor: bytes, values, and the importance of the experts they are of."""
    parts = info.shape[0] if len(info.shape) == 3 else 1
    stored = weights.raw(info.name).reshape(parts, info.shape[-2], -1)
    some = _spread(parts, 8)
    rows = stored[some][:, _spread(info.shape[-2], MAX_ROWS)]
    shape = (len(some), rows.shape[1], info.shape[-1])
    raw = np.ascontiguousarray(rows).reshape(-1)
    values = dequantize(raw, info.type, shape)
    weighed = importance[some] if importance is not None and importance.ndim == 2 else importance
    return _Sample(raw, TensorInfo(info.name, info.type, shape)), values, weighed


def _spread(count: int, most: int) -> npt.NDArray[np.int64]:
    wanted = min(count, most)
    return (2 * np.arange(wanted) + 1) * count // (2 * wanted)
