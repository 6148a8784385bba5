"""IQ4_XS and MXFP4 as types to write: the native core has no kernels for them, files are read as other types."""

from __future__ import annotations

from enum import Enum

from kvarn.formats.weights import TensorType


class StorageOnlyType(Enum):
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


WrittenType = TensorType | StorageOnlyType
