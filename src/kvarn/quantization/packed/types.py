"""IQ4_XS and MXFP4 as types to write; the native core has no kernels for them, files are read as other types."""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from kvarn.backends.native import _native
from kvarn.formats.weights import TensorType
from kvarn.quantization.packed.iq4_xs import encode_iq4_xs
from kvarn.quantization.packed.mxfp4 import encode_mxfp4

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class PackedType(Enum):
    """ggml's id, values per block, bytes per block."""

    IQ4_XS = (23, 256, 136)
    MXFP4 = (39, 32, 17)

    @property
    def id(self) -> int:
        return self.value[0]

    @property
    def block_values(self) -> int:
        return self.value[1]

    @property
    def nearest(self) -> TensorType:
        """The type of the native core that rounds most like it."""
        return TensorType.IQ4_NL

    def num_bytes(self, num_values: int) -> int:
        """Bytes of num_values stored values, a multiple of block_values."""
        return num_values // self.value[1] * self.value[2]


WrittenType = TensorType | PackedType


def encode(values: Float32, type: PackedType, importance: Float32 | None, team: _native.ThreadTeam) -> Bytes:
    """The bytes of rows of finite values; importance: one number for each column, or none."""
    if type is PackedType.IQ4_XS:
        return encode_iq4_xs(values, importance, team)
    return encode_mxfp4(values, importance)
