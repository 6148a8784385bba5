"""What the methods of quantised folders have in common: a matrix as integers and scales, packed as one of our types.

value[r, c] = scales[r, group of c] * integers[r, c], exactly; the zero points are already subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.block_quants import pack_bits, pack_nibbles
from kvarn.formats.weights import Float8Matrix, TensorInfo, TensorType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
T = TensorType
BLOCK = 32
_CHUNK_VALUES = 1 << 21  # that many are unpacked at a time
_HOLDS = {T.Q4_0: (-8, 7), T.Q5_0: (-16, 15), T.Q8_0: (-128, 127)}  # the integers of a block type
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the folder as it is stored: safetensors' name of its type, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that is being opened: config.json's quantization_config, what is stored, and its values.

    read: I32, I64 and I8 as such, F8 as bytes, F32, F16 and BF16 as float32.
    """

    path: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    read: Callable[[str], npt.NDArray[Any]]

    def unsupported(self, message: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.path}: {message}; this version of Kvarn cannot run it, choose another file of the model",
            fields=("quantization_config",),
        )

    def error(self, message: str) -> FormatError:
        return FormatError(f"{message}; the file is damaged or was made by another program", file=self.path)

    def expect(self, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> StoredTensor:
        """A tensor of this shape (None: any length), or an error that names it."""
        found = self.tensors.get(name)
        if found is None:
            raise self.error(f"tensor {name} is missing")
        fits = len(found.shape) == len(shape) and all(w in (None, n) for w, n in zip(shape, found.shape, strict=True))
        if found.dtype not in dtypes or not fits:
            wanted = tuple("any" if length is None else length for length in shape)
            raise self.error(f"tensor {name} is {found}; expected {' or '.join(dtypes)} {wanted}")
        return found

    def stems(self, suffix: str) -> list[str]:
        """The names, without it, of the tensors that end so."""
        return sorted(name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix))

    def finite(self, name: str) -> Floats:
        """The values of a small tensor of scales."""
        values = self.read(name)
        if not np.isfinite(values).all():
            raise self.error(f"tensor {name} has NaN or infinite values")
        return np.asarray(values, np.float32)


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """integers (rows, columns), scales (rows, groups); group_of: of each column, None where they follow each other."""

    integers: npt.NDArray[np.int16]
    scales: Floats
    group_of: npt.NDArray[np.int64] | None = None

    def values(self) -> Floats:
        """The values, exact: the bits of an integer and of a float16 fit in a float32 together."""
        columns = self.integers.shape[1]
        group_of = np.arange(columns) // (columns // self.scales.shape[1]) if self.group_of is None else self.group_of
        return self.integers.astype(np.float32) * self.scales[:, group_of]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor of the folder: what it appears as, of which stored ones it is made; how rows of it are read.

    packed: the bytes of info.type; dense: exact floats. Rows are those of (rows, last axis). float8: as it is stored,
    where that is FP8 with a scale for at least 32 columns.
    """

    info: TensorInfo
    parts: tuple[str, ...]
    packed: Callable[[slice], Bytes]
    dense: Callable[[slice], Floats]
    float8: Float8Matrix | None = None

    def raw(self) -> Bytes:
        """All bytes, flat."""
        return np.concatenate([self.packed(rows).reshape(-1) for rows in self._chunks()])

    def array(self) -> Floats:
        """All values."""
        return np.concatenate([self.dense(rows) for rows in self._chunks()]).reshape(self.info.shape)

    def _chunks(self) -> Iterator[slice]:
        columns = self.info.shape[-1]
        num_rows, step = self.info.num_values // columns, max(1, _CHUNK_VALUES // columns)
        return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))


@dataclass(frozen=True, slots=True)
class Quantized:
    """The matrices of a folder by name, further tensors that no model reads, and what a user should know."""

    tensors: Mapping[str, QuantizedTensor]
    unread: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IntegerLayer:
    """A matrix before its type is chosen. group: columns with one scale, 0 where they do not follow each other.

    low, high: of its integers. has_halves: its scales are float16 numbers. read: some rows of it.
    """

    name: str
    shape: tuple[int, int]
    group: int
    low: int
    high: int
    has_halves: bool
    parts: tuple[str, ...]
    read: Callable[[slice], IntegerMatrix]


def quantized(method: str, layers: Sequence[IntegerLayer]) -> Quantized:
    """Choose the types: of all layers the smallest that holds the integers of all, so that experts are alike."""
    low, high = min((one.low for one in layers), default=0), max((one.high for one in layers), default=0)
    tensors: dict[str, QuantizedTensor] = {}
    notes: dict[str, None] = {}
    for layer in layers:
        type_ = _block_type(layer, low, high)
        tensors[layer.name] = _integers(layer, TensorInfo(layer.name, type_, layer.shape))
        loss = "values are rounded to 11 bits" if type_ is T.F16 else "scales are rounded to 11 bits"
        exact = type_ is not T.F16 and layer.has_halves
        notes[f"{method} weights are run as {type_.name}: {'the same values' if exact else loss}"] = None
    return Quantized(tensors, notes=tuple(notes))


def floats(info: TensorInfo, parts: tuple[str, ...], dense: Callable[[slice], Floats]) -> QuantizedTensor:
    """A tensor that is run as float16."""
    return QuantizedTensor(info, parts, lambda rows: _as_floats(dense(rows), info), dense)


def _integers(layer: IntegerLayer, info: TensorInfo) -> QuantizedTensor:
    def dense(rows: slice) -> Floats:
        return layer.read(rows).values()

    if info.type is T.F16:
        return floats(info, layer.parts, dense)
    return QuantizedTensor(info, layer.parts, lambda rows: _as_blocks(layer.read(rows), info), dense)


def _block_type(layer: IntegerLayer, low: int, high: int) -> TensorType:
    """F16 where a block of 32 columns would cross groups."""
    if layer.shape[1] % BLOCK == 0 and layer.group and layer.group % BLOCK == 0:
        for type_, (lowest, highest) in _HOLDS.items():
            if lowest <= low and high <= highest:
                return type_
    return T.F16


def unpacked(words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.int16]:
    """The fields of 32-bit words, lowest bits first, along the last axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return fields.astype(np.int16).reshape(*words.shape[:-1], -1)


def _as_floats(values: Floats, info: TensorInfo) -> Bytes:
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        raise FormatError(f"tensor {info.name} has values that float16 does not hold; use another file of the model")
    return halves.reshape(-1).view(np.uint8)


def _as_blocks(matrix: IntegerMatrix, info: TensorInfo) -> Bytes:
    low, high = _HOLDS[info.type]
    if matrix.integers.min() < low or matrix.integers.max() > high:
        raise FormatError(f"tensor {info.name} has integers beyond those of {info.type.name}, {low} to {high}")
    per_group = matrix.integers.shape[1] // matrix.scales.shape[1] // BLOCK
    with np.errstate(over="ignore"):
        scales = np.repeat(matrix.scales, per_group, axis=1).reshape(-1, 1).astype("<f2")
    if not np.isfinite(scales).all():
        raise FormatError(f"tensor {info.name} has a scale that float16 does not hold; use another file of the model")
    integers = matrix.integers.reshape(-1, BLOCK)
    if info.type is T.Q8_0:
        quants = [integers.astype(np.int8).view(np.uint8)]
    else:
        unsigned = (integers - low).astype(np.uint8)
        high_bits = [pack_bits(unsigned >> 4)] if info.type is T.Q5_0 else []
        quants = [*high_bits, pack_nibbles(unsigned & 15)]
    return np.hstack([np.ascontiguousarray(scales).view(np.uint8), *quants]).reshape(-1)
