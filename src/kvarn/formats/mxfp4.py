"""MXFP4 read as Q8_0: the same values, exactly, in twice the bytes and with the kernels that there are.

A block has a scale 2^(e - 128), e a byte, and 32 codes of 4 bits; a code stands for twice its E2M1 value, an integer up
to 12 (OCP Microscaling Formats 1.0). In GGUF files the 16 bytes of codes follow e, the first 16 in their low halves; in
folders they are a tensor of their own, two neighbours in each byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.weights import TensorType

Bytes = npt.NDArray[np.uint8]

TYPE_ID: Final = 39  # ggml's
BLOCK_BYTES: Final = 17
CODES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
SMALLEST, LARGEST = -24, 15  # exponents of the powers of two that f16 holds
_CHUNK_BLOCKS = 1 << 16


def stored_bytes(num_values: int) -> int:
    """Bytes of so many values, a multiple of 32."""
    return num_values // TensorType.Q8_0.block_values * BLOCK_BYTES


def as_q8_0(raw: Bytes, name: str) -> Bytes:
    """Convert the bytes of a tensor of a GGUF file; a scale that f16 cannot hold is refused."""
    blocks = raw.reshape(-1, BLOCK_BYTES)
    return _in_chunks(blocks[:, 1:], blocks[:, 0], lambda low, high: np.concatenate([low, high], axis=1), name)


def pair_as_q8_0(blocks: Bytes, scales: Bytes, name: str) -> Bytes:
    """Convert a pair of tensors of a folder, in which the two codes of a byte are neighbours."""
    halves = blocks.reshape(-1, CODES.size)
    return _in_chunks(halves, scales, lambda low, high: np.stack([low, high], axis=2).reshape(len(low), -1), name)


def _in_chunks(halves: Bytes, exponents: Bytes, order: Callable[[Bytes, Bytes], Bytes], name: str) -> Bytes:
    out = np.empty((len(halves), TensorType.Q8_0.block_bytes), np.uint8)
    for begin in range(0, len(halves), _CHUNK_BLOCKS):
        some = slice(begin, begin + _CHUNK_BLOCKS)
        out[some] = _convert(order(halves[some] & np.uint8(15), halves[some] >> np.uint8(4)), exponents[some], name)
    return out.reshape(-1)


def _convert(codes: Bytes, stored: Bytes, name: str) -> Bytes:
    values = CODES[codes]
    exponents = np.where(values.any(axis=1), stored.astype(np.int32) - 128, 0)
    if exponents.size and not SMALLEST <= exponents.min() <= exponents.max() <= LARGEST:
        raise FormatError(
            f"tensor {name} has a scale of 2^{exponents.min()} or 2^{exponents.max()}; "
            f"those from 2^{SMALLEST} to 2^{LARGEST} can be read, use a file of another type"
        )
    scales = np.ldexp(np.float32(1), exponents).astype("<f2")
    return np.concatenate([scales[:, None].view(np.uint8), values.view(np.uint8)], axis=1)
