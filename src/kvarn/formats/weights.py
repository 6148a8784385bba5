"""Named tensors and where they come from: the one interface above all file formats.

Knows types, shapes and bytes; does no arithmetic and does not know what a model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class TensorType(Enum):
    """A storage type: ggml's id, values per block, bytes per block."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    BF16 = (30, 1, 2)

    @property
    def id(self) -> int:
        return self.value[0]

    @property
    def block_values(self) -> int:
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        return self.value[2]

    def num_bytes(self, num_values: int) -> int:
        """Bytes of num_values stored values; num_values is a multiple of block_values."""
        return num_values // self.block_values * self.block_bytes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape is in NumPy order: the last axis is contiguous and is the one that is quantised."""

    name: str
    type: TensorType
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.type.num_bytes(self.num_values)


class WeightSource(Protocol):
    """Tensors under their canonical (GGUF) names, with the metadata of the file they came from."""

    @property
    def path(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF keys and plain Python values; for a safetensors folder: {"hf": config.json as a dict}."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes, flat and read-only, without a copy where the format allows it.

        Of a type that has no kernels, the bytes of the nearest one that has, which is the type in `tensors`.
        """

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """The values, dequantised, in the tensor's shape."""

    def release_pages(self, names: Iterable[str]) -> None:
        """Advise the system that the pages of these tensors will not be read again soon."""

    def verify_unchanged(self) -> None:
        """Raise FormatError if a file changed since it was opened; call it when everything was copied."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """Some rows of a matrix as its file has it in FP8; nothing is read before it is asked for.

    stored: codes of E4M3, (all rows, columns) bytes, and what they are multiplied by, (all rows or 1, columns / 32 or
    1): a scale is of 32 columns, or of a whole row.
    """

    stored: Callable[[], tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]]
    begin: int = 0
    end: int | None = None

    def read(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """Codes and scales of these rows."""
        codes, scales = self.stored()
        rows = slice(self.begin, self.end)
        return codes[rows], scales[rows] if len(scales) > 1 else scales


def float8_of(source: WeightSource, name: str) -> Float8Matrix | None:
    """A matrix that its file has in FP8, and that appears as F16; others, and most sources, have none."""
    find = getattr(source, "float8", None)
    found: Float8Matrix | None = None if find is None else find(name)
    return found


def conversions(source: WeightSource) -> tuple[str, ...]:
    """What tensors of types without kernels are run as and what that loses, a line each; most sources have none."""
    found: tuple[str, ...] = getattr(source, "conversions", ())
    return found
