"""Types with values of 1.6 to 4 bits: TQ1_0 and TQ2_0, which are -1, 0 or 1 times a scale, and NVFP4.

TQ1_0  low[48] | high[4] | d     five (four) values in a byte, digits of a fraction in base 3, highest first
TQ2_0  q[64] | d                 byte 32 h + i holds 2 bits of each of the values 128 h + 32 j + i, j = 0..3
NVFP4  scales[4] | q[32]         E4M3 scales without a sign, of 16 values each; E2M1 codes as in MXFP4
"""

from __future__ import annotations

import numpy as np

from kvarn.formats.block_quants import Bytes, read_half
from kvarn.formats.stored_types.integer_blocks import IntegerBlocks, Integers
from kvarn.formats.stored_types.mxfp4 import CODES

_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)
# Half of the scales, because CODES are twice the values; 0x7F is not a number, and 0 by ggml's definition.
_E4M3 = np.array([(m * 2.0**-10 if e == 0 else (8 + m) * 2.0 ** (e - 11)) for e in range(16) for m in range(8)])
_E4M3[0x7F] = 0.0
_SCALES = np.tile(_E4M3, 2).astype(np.float32)  # the sign bit is not read


def read_tq1_0(stored: Bytes) -> IntegerBlocks:
    parts = [(stored[:, :32], 5), (stored[:, 32:48], 5), (stored[:, 48:52], 4)]
    digits = [(packed[:, None] * _POWERS[:count, None]).reshape(len(stored), -1) for packed, count in parts]
    integers = (np.hstack(digits).astype(np.uint16) * 3 >> 8).astype(np.int8) - 1
    return _ternary(stored, 52, integers)


def read_tq2_0(stored: Bytes) -> IntegerBlocks:
    packed = stored[:, :64].reshape(len(stored), 2, 1, 32)
    quants = packed >> np.array([[0], [2], [4], [6]], np.uint8) & np.uint8(3)
    return _ternary(stored, 64, quants.reshape(len(stored), 256).astype(np.int8) - 1)


def read_nvfp4(stored: Bytes) -> IntegerBlocks:
    packed = stored[:, 4:].reshape(len(stored), 4, 8)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(len(stored), 64)
    return IntegerBlocks(np.ones((len(stored), 1), np.float32), _SCALES[stored[:, :4]], CODES[codes])


def _ternary(stored: Bytes, at: int, integers: Integers) -> IntegerBlocks:
    return IntegerBlocks(read_half(stored, at), np.ones((len(stored), 1), np.float32), integers)
