"""MXFP4 read as Q8_0: the same values, exactly, in twice the bytes and with the kernels that there are.

A block has a scale 2^(e - 128), e a byte, and 32 codes of 4 bits; a code stands for twice its E2M1 value, an integer up
to 12 (OCP Microscaling Formats 1.0). In GGUF files the 16 bytes of codes follow e, the first 16 in their low halves; in
folders they are a tensor of their own, two neighbours in each byte.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.stored_types.integer_blocks import IntegerBlocks
from kvarn.formats.weights import TensorType

Bytes = npt.NDArray[np.uint8]

CODES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
SMALLEST, LARGEST = -24, 15  # exponents of the powers of two that f16 holds
_CHUNK_BLOCKS = 1 << 16


def read(stored: Bytes) -> IntegerBlocks:
    """Integers and scales of blocks of a GGUF file, (blocks, 17 bytes)."""
    codes = np.hstack([stored[:, 1:] & np.uint8(15), stored[:, 1:] >> np.uint8(4)])
    return _blocks(codes, stored[:, 0])


def as_q8_0(blocks: IntegerBlocks) -> Bytes:
    """Exact; a scale that f16 cannot hold is refused."""
    scales = np.where(blocks.integers.any(axis=1, keepdims=True), blocks.scale, 1)
    low, high = np.log2([scales.min(), scales.max()])
    if not SMALLEST <= low <= high <= LARGEST:
        raise FormatError(
            f"a scale is 2^{low:.0f} or 2^{high:.0f}; "
            f"those from 2^{SMALLEST} to 2^{LARGEST} can be read, use a file of another type"
        )
    return np.hstack([scales.astype("<f2").view(np.uint8), blocks.integers.view(np.uint8)])


def pair_as_q8_0(blocks: Bytes, scales: Bytes, name: str) -> Bytes:
    """Convert a pair of tensors of a folder, in which the two codes of a byte are neighbours."""
    halves = blocks.reshape(-1, CODES.size)
    out = np.empty((len(halves), TensorType.Q8_0.block_bytes), np.uint8)
    try:
        for begin in range(0, len(halves), _CHUNK_BLOCKS):
            some = slice(begin, begin + _CHUNK_BLOCKS)
            codes = np.stack([halves[some] & np.uint8(15), halves[some] >> np.uint8(4)], axis=2)
            out[some] = as_q8_0(_blocks(codes.reshape(len(codes), -1), scales[some]))
    except FormatError as error:
        raise FormatError(f"tensor {name}: {error}") from None
    return out.reshape(-1)


def _blocks(codes: Bytes, exponents: Bytes) -> IntegerBlocks:
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)[:, None]
    return IntegerBlocks(scales, np.ones_like(scales), CODES[codes])
