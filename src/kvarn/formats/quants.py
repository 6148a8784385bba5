"""Stored bytes to float32 values and back, for every TensorType. NumPy only: the definition, not the fast path.

Dequantising is exact: the bits every correct reader gets. Quantising rounds to the nearest representable value
under plain per-block scales (largest magnitude, or smallest and largest value); no search, no importance weights.
The layouts are in block_quants.py (blocks of 32 values) and k_quants.py (super-blocks of 256 values).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats import block_quants, k_quants
from kvarn.formats.weights import TensorType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK_VALUES = 1 << 18  # temporaries stay in the cache and small beside the result


def dequantize(raw: Bytes, type: TensorType, shape: tuple[int, ...]) -> Floats:
    """Return the values of a stored tensor; raw holds exactly its bytes."""
    num_values = math.prod(shape)
    if num_values % type.block_values or raw.size != type.num_bytes(num_values):
        raise FormatError(f"{raw.size:,} bytes do not hold a {type.name} tensor of shape {shape}")
    stored = np.ascontiguousarray(raw).reshape(-1, type.block_bytes)
    values = np.empty((len(stored), type.block_values), dtype=np.float32)
    decode, step = _DECODERS[type], max(1, _CHUNK_VALUES // type.block_values)
    with np.errstate(invalid="ignore", over="ignore"):  # a file may hold any scale, also NaN
        for begin in range(0, len(stored), step):
            values[begin : begin + step] = decode(stored[begin : begin + step])
    return values.reshape(shape)


def quantize(array: npt.NDArray[Any], type: TensorType) -> Bytes:
    """Return the bytes that store array as type, flat."""
    values = np.ascontiguousarray(array, dtype=np.float32)
    row = values.shape[-1] if values.ndim else 1
    if row % type.block_values:
        raise UnsupportedModel(f"rows of {row:,} values cannot be {type.name}, whose blocks have {type.block_values}")
    if type.block_values > 1 and not np.isfinite(values).all():
        raise FormatError(f"an array with NaN or infinite values cannot be quantised to {type.name}")
    values = values.reshape(-1, type.block_values)
    stored = np.empty((len(values), type.block_bytes), dtype=np.uint8)
    encode, step = _ENCODERS[type], max(1, _CHUNK_VALUES // type.block_values)
    with np.errstate(over="ignore"):
        for begin in range(0, len(values), step):
            stored[begin : begin + step] = encode(values[begin : begin + step])
    return stored.reshape(-1)


def _decode_f32(stored: Bytes) -> Floats:
    return stored.view("<f4")


def _encode_f32(values: Floats) -> Bytes:
    return values.astype("<f4").view(np.uint8)


def _decode_f16(stored: Bytes) -> Floats:
    return stored.view("<f2").astype(np.float32)


def _encode_f16(values: Floats) -> Bytes:
    return values.astype("<f2").view(np.uint8)


def _decode_bf16(stored: Bytes) -> Floats:
    return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _encode_bf16(values: Floats) -> Bytes:
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to nearest, ties to even
    quiet_nan = bits >> 16 | 0x40  # rounding could carry a NaN's payload into infinity
    return np.where(np.isnan(values), quiet_nan, rounded).astype("<u2").view(np.uint8)


_DECODERS: dict[TensorType, Callable[[Bytes], Floats]] = {
    TensorType.F32: _decode_f32,
    TensorType.F16: _decode_f16,
    TensorType.BF16: _decode_bf16,
    TensorType.Q4_0: block_quants.decode_q4_0,
    TensorType.Q4_1: block_quants.decode_q4_1,
    TensorType.Q5_0: block_quants.decode_q5_0,
    TensorType.Q5_1: block_quants.decode_q5_1,
    TensorType.Q8_0: block_quants.decode_q8_0,
    TensorType.IQ4_NL: block_quants.decode_iq4_nl,
    TensorType.Q2_K: k_quants.decode_q2_k,
    TensorType.Q3_K: k_quants.decode_q3_k,
    TensorType.Q4_K: k_quants.decode_q4_k,
    TensorType.Q5_K: k_quants.decode_q5_k,
    TensorType.Q6_K: k_quants.decode_q6_k,
}
_ENCODERS: dict[TensorType, Callable[[Floats], Bytes]] = {
    TensorType.F32: _encode_f32,
    TensorType.F16: _encode_f16,
    TensorType.BF16: _encode_bf16,
    TensorType.Q4_0: block_quants.encode_q4_0,
    TensorType.Q4_1: block_quants.encode_q4_1,
    TensorType.Q5_0: block_quants.encode_q5_0,
    TensorType.Q5_1: block_quants.encode_q5_1,
    TensorType.Q8_0: block_quants.encode_q8_0,
    TensorType.IQ4_NL: block_quants.encode_iq4_nl,
    TensorType.Q2_K: k_quants.encode_q2_k,
    TensorType.Q3_K: k_quants.encode_q3_k,
    TensorType.Q4_K: k_quants.encode_q4_k,
    TensorType.Q5_K: k_quants.encode_q5_k,
    TensorType.Q6_K: k_quants.encode_q6_k,
}
