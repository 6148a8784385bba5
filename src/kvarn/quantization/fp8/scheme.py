"""E4M3 codes with one scale for a tensor, a row or a tile of 128 x 128, and what config.json says of them.

E4M3 has a sign, 4 bits of exponent (bias 7) and 3 of mantissa: up to 448, no infinities, steps of 2^-9 below 2^-6.
Tiles are in the layout of transformers' `fp8` (`weight_scale_inv`), tensors and rows in that of compressed-tensors'
`float-quantized` (`weight_scale`). A value is its code's times the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LARGEST: Final = np.float32(448)
TILE: Final = 128
_SMALLEST_NORMAL: Final = np.float32(2**-6)
_STEPS_BELOW: Final = np.float32(2**9)


class FP8Scheme(Enum):
    """What shares a scale; the value is the word of compressed-tensors for it."""

    FP8_TENSOR = "tensor"
    FP8_ROW = "channel"
    FP8_BLOCK = "block"

    @property
    def suffix(self) -> str:
        """Of the name of the scales' tensor, after that of the matrix."""
        return "_scale_inv" if self is FP8Scheme.FP8_BLOCK else "_scale"

    def scales_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if self is FP8Scheme.FP8_TENSOR:
            return (1,)
        return (rows, 1) if self is FP8Scheme.FP8_ROW else (rows // TILE, columns // TILE)

    def fits(self, rows: int, columns: int) -> bool:
        """Readers disagree on tiles that reach over the edge of a matrix, so none are written."""
        return self is not FP8Scheme.FP8_BLOCK or (rows % TILE == 0 and columns % TILE == 0)

    def peaks(self, values: Float32) -> Float32:
        """Largest magnitudes of whole rows of a matrix, in the shape of their scales."""
        magnitudes = np.abs(values)
        found: Float32
        if self is FP8Scheme.FP8_TENSOR:
            found = magnitudes.max(keepdims=True).reshape(1)
        elif self is FP8Scheme.FP8_ROW:
            found = magnitudes.max(axis=1, keepdims=True)
        else:
            found = magnitudes.reshape(-1, TILE, values.shape[1] // TILE, TILE).max(axis=(1, 3))
        return found

    def spread(self, scales: Float32) -> Float32:
        """Scales of whole rows of a matrix, so that they can be divided by."""
        if self is not FP8Scheme.FP8_BLOCK:
            return scales
        return scales.repeat(TILE, axis=0).repeat(TILE, axis=1)

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """quantization_config of config.json; ignored: modules that are no FP8."""
        if self is FP8Scheme.FP8_BLOCK:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [TILE, TILE],
                "modules_to_not_convert": list(ignored),
            }
        weights = _compressed(self.value, dynamic=False)
        inputs = _compressed("token", dynamic=True)
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
        }


def scales_of(peaks: Float32) -> Float32:
    """So that the largest value of each group is the largest code; 1 for a group of zeros."""
    scales: Float32 = np.where(peaks > 0, peaks / LARGEST, np.float32(1))
    return scales


def encode(values: Float32) -> Bytes:
    """The nearest codes of finite values, ties to even; beyond the largest, the largest."""
    signs = (values.view(np.uint32) >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    magnitudes = np.minimum(np.abs(values), LARGEST)
    bits = magnitudes.view(np.uint32)
    bits = bits + np.uint32((1 << 19) - 1) + ((bits >> np.uint32(20)) & np.uint32(1))
    normal = (bits >> np.uint32(20)) - np.uint32((127 - 7) << 3)
    small = np.rint(magnitudes * _STEPS_BELOW)
    codes = np.where(magnitudes < _SMALLEST_NORMAL, small, normal).astype(np.uint8)
    coded: Bytes = codes | signs
    return coded


def _compressed(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "observer": None if dynamic else "minmax",
        "group_size": None,
        "block_structure": None,
        "actorder": None,
    }
