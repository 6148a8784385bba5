"""Rows of values in the types of types.py; needs the native core, which the types alone do not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvarn.backends.native import _native
from kvarn.quantization.packed.iq4_xs import encode_iq4_xs
from kvarn.quantization.packed.mxfp4 import encode_mxfp4
from kvarn.quantization.packed.types import PackedType

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def encode(values: Float32, type: PackedType, importance: Float32 | None, team: _native.ThreadTeam) -> Bytes:
    """The bytes of rows of finite values; importance: one number for each column, or none."""
    if type is PackedType.IQ4_XS:
        return encode_iq4_xs(values, importance, team)
    return encode_mxfp4(values, importance)
