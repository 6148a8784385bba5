"""Rows of a stored tensor in another type, a slice at a time. The arithmetic is the native core's (csrc/quant)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvarn.backends.native import _native
from kvarn.errors import FormatError
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.quantization.storage_only.iq4_xs import encode_iq4_xs
from kvarn.quantization.storage_only.mxfp4 import encode_mxfp4
from kvarn.quantization.storage_only.types import StorageOnlyType, WrittenType

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

SLICE_VALUES = 1 << 23  # of one call: short enough for a Ctrl-C between two
FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
_EVENLY = np.empty(0, np.float32)


def requantized(
    raw: Bytes, info: TensorInfo, type: WrittenType, importance: Float32 | None, team: _native.ThreadTeam
) -> Iterator[Bytes]:
    """The bytes of a tensor as another type, in slices of whole rows.

    importance: weight of an error, (columns) or (experts, columns) for a stack of matrices; None: all alike.
    """
    columns = info.shape[-1]
    parts = info.shape[0] if importance is not None and importance.ndim == 2 else 1
    rows_per_part = info.num_values // columns // parts
    stored = raw.reshape(parts * rows_per_part, -1)
    for part in range(parts):
        weights = _EVENLY if importance is None else _normalized(importance if parts == 1 else importance[part])
        rows = stored[part * rows_per_part : (part + 1) * rows_per_part]
        step = max(1, SLICE_VALUES // columns)
        for begin in range(0, len(rows), step):
            yield _quantize(rows[begin : begin + step], info, type, weights, team)


def _quantize(rows: Bytes, info: TensorInfo, type: WrittenType, weights: Float32, team: _native.ThreadTeam) -> Bytes:
    count, columns, source = len(rows), info.shape[-1], info.type
    flat = rows.reshape(-1)
    if source not in FLOATS:
        flat = dequantize(flat, source, (count, columns)).reshape(-1).view(np.uint8)
        source = TensorType.F32
    if isinstance(type, StorageOnlyType):
        values = dequantize(flat, source, (count, columns))
        if np.isfinite(values).all():
            return encode(values, type, weights if weights.size else None, team)
        raise FormatError(f"tensor {info.name} has NaN or infinite values; it cannot be {type.name}")
    out = np.empty(type.num_bytes(count * columns), np.uint8)
    if not _native.quantize(source.id, type.id, count, columns, flat, weights, out, team):
        raise FormatError(f"tensor {info.name} has NaN or infinite values; it cannot be {type.name}")
    return out


def _normalized(importance: Float32) -> Float32:
    """Around 1, and never 0: calibration has not seen everything that a column may carry."""
    mean = float(importance.mean(dtype=np.float64))
    if not mean > 0:
        return np.ones_like(importance)
    weights: Float32 = np.maximum(importance / np.float32(mean), np.float32(1e-5))
    return weights


def encode(values: Float32, type: StorageOnlyType, importance: Float32 | None, team: _native.ThreadTeam) -> Bytes:
    """The bytes of rows of finite values; importance: one number for each column, or none."""
    if type is StorageOnlyType.IQ4_XS:
        return encode_iq4_xs(values, importance, team)
    return encode_mxfp4(values, importance)
