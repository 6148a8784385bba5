"""Quantised GGUF blocks to floats on the device: the layouts of kvarn.formats.block_quants and k_quants, same bits.

Functions take (blocks, bytes) uint8 and return (blocks, values) float32; every step rounds as the definition's does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvarn.formats.block_quants import IQ4_NL_VALUES
from kvarn.formats.weights import TensorType

CHUNK_VALUES = 1 << 24  # temporaries stay small beside the result


def dequantize(raw: Tensor, type: TensorType, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values of a stored tensor, rounded to dtype; raw holds exactly its bytes."""
    stored = raw.view(-1, type.block_bytes)
    values = torch.empty((len(stored), type.block_values), dtype=dtype, device=raw.device)
    decode, step = DECODERS[type], max(1, CHUNK_VALUES // type.block_values)
    for begin in range(0, len(stored), step):
        values[begin : begin + step] = decode(stored[begin : begin + step])
    return values.view(shape)


def _q4_0(stored: Tensor) -> Tensor:
    return half(stored, 0) * (nibbles(stored[:, 2:]).float() - 8)


def _q4_1(stored: Tensor) -> Tensor:
    return half(stored, 0) * nibbles(stored[:, 4:]).float() + half(stored, 2)


def _q5_0(stored: Tensor) -> Tensor:
    quants = nibbles(stored[:, 6:]) | bits_of(stored[:, 2:6]) << 4
    return half(stored, 0) * (quants.float() - 16)


def _q5_1(stored: Tensor) -> Tensor:
    quants = nibbles(stored[:, 8:]) | bits_of(stored[:, 4:8]) << 4
    return half(stored, 0) * quants.float() + half(stored, 2)


def _q8_0(stored: Tensor) -> Tensor:
    return half(stored, 0) * stored[:, 2:].contiguous().view(torch.int8).float()


def _iq4_nl(stored: Tensor) -> Tensor:
    levels = torch.tensor(IQ4_NL_VALUES, dtype=torch.float32, device=stored.device)
    return half(stored, 0) * levels[nibbles(stored[:, 2:]).int()]


def _q2_k(stored: Tensor) -> Tensor:
    packed = stored[:, :16]
    scales, mins = half(stored, 80) * (packed & 15).float(), half(stored, 82) * (packed >> 4).float()
    return _affine(spread(stored[:, 16:80], 32, 2), scales, mins)


def _q3_k(stored: Tensor) -> Tensor:
    packed = stored[:, 96:108]
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], dim=1)
    high = torch.cat([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = half(stored, 108) * ((low | high << 4).float() - 32)
    quants = spread(stored[:, 32:96], 32, 2) | spread(stored[:, :32], 32, 1) << 2
    return _scaled(quants.float() - 4, scales)


def _q4_k(stored: Tensor) -> Tensor:
    return _affine(spread(stored[:, 16:], 32, 4), *affine_scales(stored))


def _q5_k(stored: Tensor) -> Tensor:
    quants = spread(stored[:, 48:], 32, 4) | spread(stored[:, 16:48], 32, 1) << 4
    return _affine(quants, *affine_scales(stored))


def _q6_k(stored: Tensor) -> Tensor:
    quants = spread(stored[:, :128], 64, 4) | spread(stored[:, 128:192], 32, 2) << 4
    return _scaled(quants.float() - 32, small_scales(stored))


DECODERS: dict[TensorType, Callable[[Tensor], Tensor]] = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.Q2_K: _q2_k,
    TensorType.Q3_K: _q3_k,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}


def half(stored: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, as a column."""
    return stored[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def bits_of(packed: Tensor) -> Tensor:
    """Every bit as a value, the lowest of the first byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits: Tensor = packed[:, :, None] >> shifts & 1
    return bits.view(len(packed), -1)


def spread(packed: Tensor, run: int, bits: int) -> Tensor:
    """Unpack fields of `bits` bits; the fields of a byte belong to values `run` apart, lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    fields: Tensor = packed.reshape(len(packed), -1, 1, run) >> shifts & (2**bits - 1)
    return fields.view(len(packed), 256)


def _affine(quants: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    parts = quants.float().view(*scales.shape, -1)
    return (scales[..., None] * parts - mins[..., None]).view(len(quants), 256)


def _scaled(quants: Tensor, scales: Tensor) -> Tensor:
    return (scales[..., None] * quants.view(*scales.shape, -1)).view(len(quants), 256)


def affine_scales(stored: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minima of Q4_K and Q5_K, 6 bits times a float16, (blocks, 8) each."""
    first, second, third = stored[:, 4:8], stored[:, 8:12], stored[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    mins = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return half(stored, 0) * scales.float(), half(stored, 2) * mins.float()


def small_scales(stored: Tensor) -> Tensor:
    """The scales of Q6_K, 8 bits times a float16, (blocks, 16)."""
    return half(stored, 208) * stored[:, 192:208].contiguous().view(torch.int8).float()
