"""The types of GGUF files that have no kernels: how they are read, and as which of the types that have they are run.

raw bytes are converted when a tensor is loaded; `loss` says what of its values is not kept, for the user to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from kvarn.errors import FormatError
from kvarn.formats.block_quants import Bytes, Floats
from kvarn.formats.stored_types import iq_quants, mxfp4, small_floats
from kvarn.formats.stored_types.integer_blocks import (
    IntegerBlocks,
    as_iq4_nl,
    as_q2_k,
    as_q5_k,
    as_q6_k,
    as_q8_0,
    pairs_as_q8_0,
)
from kvarn.formats.weights import TensorType

T = TensorType
_CHUNK_VALUES = 1 << 18  # temporaries stay small beside the result
_ROUNDED = "scales are rounded to 11 bits"
_COMMON = "groups of 16 values share a scale of 32, values are rounded to it"


@dataclass(frozen=True, slots=True)
class StoredType:
    """One of ggml's types. read: blocks as integers and scales; pack: those as the target's blocks.

    loss: what is not kept, "" where nothing is lost.
    """

    id: int
    name: str
    block_values: int
    block_bytes: int
    target: TensorType
    read: Callable[[Bytes], IntegerBlocks]
    pack: Callable[[IntegerBlocks], Bytes]
    loss: str = ""

    @property
    def note(self) -> str:
        """What a user should know of a file with this type."""
        return f"{self.name} weights are run as {self.target.name}: {self.loss or 'the same values'}"

    def num_bytes(self, num_values: int) -> int:
        """Bytes of so many values, a multiple of block_values."""
        return num_values // self.block_values * self.block_bytes

    def decoded(self, raw: Bytes) -> Floats:
        """The values, flat and exact."""
        return np.concatenate([blocks.decoded().reshape(-1) for blocks in self._chunks(raw)])

    def converted(self, raw: Bytes, name: str) -> Bytes:
        """The target's bytes, flat."""
        try:
            return np.concatenate([self.pack(blocks).reshape(-1) for blocks in self._chunks(raw)])
        except FormatError as error:
            raise FormatError(f"tensor {name}: {error}") from None

    def _chunks(self, raw: Bytes) -> Iterator[IntegerBlocks]:
        stored = np.ascontiguousarray(raw).reshape(-1, self.block_bytes)
        step = max(1, _CHUNK_VALUES // self.block_values)
        with np.errstate(invalid="ignore", over="ignore"):  # a file may hold any scale, also NaN
            for begin in range(0, len(stored), step):
                yield self.read(stored[begin : begin + step])


# The integers go to 43 and to 12: with the largest steps, to 127.
_two_bits = partial(pairs_as_q8_0, steps=(2, 127 / 43))
_four_bits = partial(pairs_as_q8_0, steps=(8, 9, 10, 127 / 12))
_TYPES: Final = (
    StoredType(39, "MXFP4", 32, 17, T.Q8_0, mxfp4.read, mxfp4.as_q8_0),
    StoredType(34, "TQ1_0", 256, 54, T.Q2_K, small_floats.read_tq1_0, as_q2_k),
    StoredType(35, "TQ2_0", 256, 66, T.Q2_K, small_floats.read_tq2_0, as_q2_k),
    StoredType(19, "IQ1_S", 256, 50, T.Q5_K, iq_quants.read_iq1_s, as_q5_k),
    StoredType(29, "IQ1_M", 256, 56, T.Q6_K, iq_quants.read_iq1_m, as_q6_k),
    StoredType(18, "IQ3_XXS", 256, 98, T.Q6_K, iq_quants.read_iq3_xxs, as_q6_k),
    StoredType(21, "IQ3_S", 256, 110, T.Q5_K, iq_quants.read_iq3_s, as_q5_k),
    StoredType(23, "IQ4_XS", 256, 136, T.IQ4_NL, iq_quants.read_iq4_xs, as_iq4_nl, _ROUNDED),
    StoredType(16, "IQ2_XXS", 256, 66, T.Q8_0, iq_quants.read_iq2_xxs, as_q8_0, _ROUNDED),
    StoredType(17, "IQ2_XS", 256, 74, T.Q8_0, iq_quants.read_iq2_xs, _two_bits, _COMMON),
    StoredType(22, "IQ2_S", 256, 82, T.Q8_0, iq_quants.read_iq2_s, _two_bits, _COMMON),
    StoredType(40, "NVFP4", 64, 36, T.Q8_0, small_floats.read_nvfp4, _four_bits, _COMMON),
)
STORED_TYPES: Final = {one.id: one for one in _TYPES}
