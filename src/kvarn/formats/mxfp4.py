"""MXFP4 read as Q8_0: the same values, exactly, in twice the bytes and with the kernels that there are.

A block has a scale 2^(e - 128), e its first byte, and 32 codes of 4 bits, the first 16 in the low halves of the bytes
that follow; a code stands for twice its E2M1 value, an integer up to 12. (OCP Microscaling Formats 1.0; ggml's order.)
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.weights import TensorType

TYPE_ID: Final = 39  # ggml's
BLOCK_BYTES: Final = 17
CODES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
SMALLEST, LARGEST = -24, 15  # exponents of the powers of two that f16 holds
_CHUNK_BLOCKS = 1 << 16


def stored_bytes(num_values: int) -> int:
    """Bytes of so many values, a multiple of 32."""
    return num_values // TensorType.Q8_0.block_values * BLOCK_BYTES


def as_q8_0(raw: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    """Convert the bytes of a tensor; a scale that f16 cannot hold is refused."""
    blocks = raw.reshape(-1, BLOCK_BYTES)
    out = np.empty((len(blocks), TensorType.Q8_0.block_bytes), np.uint8)
    for begin in range(0, len(blocks), _CHUNK_BLOCKS):
        some = slice(begin, begin + _CHUNK_BLOCKS)
        out[some] = _convert(blocks[some], name)
    return out.reshape(-1)


def _convert(blocks: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    halves = blocks[:, 1:]
    values = CODES[np.concatenate([halves & 15, halves >> 4], axis=1)]
    exponents = np.where(values.any(axis=1), blocks[:, 0].astype(np.int32) - 128, 0)
    if exponents.size and not SMALLEST <= exponents.min() <= exponents.max() <= LARGEST:
        raise FormatError(
            f"tensor {name} has a scale of 2^{exponents.min()} or 2^{exponents.max()}; "
            f"those from 2^{SMALLEST} to 2^{LARGEST} can be read, use a file of another type"
        )
    scales = np.ldexp(np.float32(1), exponents).astype("<f2")
    return np.concatenate([scales[:, None].view(np.uint8), values.view(np.uint8)], axis=1)
