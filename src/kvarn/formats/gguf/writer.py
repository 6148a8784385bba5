"""Write GGUF version 3 files, whole or in parts. A file appears under its final name only when it is complete.

Metadata values choose their GGUF type by their Python type: bool, str, int (UINT32, else INT32, INT64 or UINT64),
float (FLOAT32), lists of one of these (ints INT32, else INT64 or UINT64), and for full control NumPy scalars and
arrays, written in their own type, and StoredValue, written as it is. bytes is text that need not be UTF-8, as are str
with surrogateescape.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.gguf import limits
from kvarn.formats.gguf.metadata import DTYPES, NumberArray, StoredValue, ValueType
from kvarn.formats.gguf.new_file import NewFile
from kvarn.formats.gguf.splits import part_path
from kvarn.formats.quants import quantize
from kvarn.formats.weights import TensorType

_VERSION = 3
_TYPES = {dtype: type_ for type_, dtype in DTYPES.items()}
_FLOATS = {np.dtype(np.float32): TensorType.F32, np.dtype(np.float16): TensorType.F16}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as bytes: shape in NumPy order, data flat."""

    type: TensorType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    @classmethod
    def quantized(cls, array: npt.NDArray[Any], type: TensorType) -> Stored:
        """Store an array of values as type."""
        return cls(type, array.shape, quantize(array, type))

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def pieces(self) -> Iterator[npt.NDArray[np.uint8]]:
        yield self.data


class FileType(Protocol):
    """What a file says of a tensor's type; TensorType is one."""

    @property
    def id(self) -> int: ...

    def num_bytes(self, num_values: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Streamed:
    """A tensor whose bytes are made while the file is written, so that none has to be held whole."""

    type: FileType
    shape: tuple[int, ...]
    make: Callable[[], Iterable[npt.NDArray[np.uint8]]]

    @property
    def num_bytes(self) -> int:
        return self.type.num_bytes(int(np.prod(self.shape, dtype=object)))

    def pieces(self) -> Iterator[npt.NDArray[np.uint8]]:
        yield from self.make()


Tensors = Mapping[str, "npt.NDArray[Any] | Stored | Streamed"]


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Tensors,
    *,
    split_max_tensors: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write a model and return its files; with split_max_tensors, in parts of at most that many tensors.

    float32 and float16 arrays are written as they are; Stored.quantized makes every other type. progress(done_bytes,
    total_bytes) is called after each piece of a file.
    """
    if split_max_tensors is None:
        return _write_all([(Path(path), metadata, tensors)], progress)
    names = list(tensors)
    groups = [names[i : i + split_max_tensors] for i in range(0, len(names), split_max_tensors)] or [[]]
    files = []
    for number, group in enumerate(groups):
        split = {
            "split.no": np.uint16(number),
            "split.count": np.uint16(len(groups)),
            "split.tensors.count": np.int32(len(names)),
        }
        entries = {**metadata, **split} if number == 0 else _alignment_only(metadata) | split
        target = Path(part_path(os.fspath(path), number + 1, len(groups)))
        files.append((target, entries, {name: tensors[name] for name in group}))
    return _write_all(files, progress)


def write_gguf_to(
    file: IO[bytes],
    metadata: Mapping[str, Any],
    tensors: Tensors,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a model into an open file."""
    stored = {name: _stored(name, tensor) for name, tensor in tensors.items()}
    _write_file(file, metadata, stored, progress)


def gguf_size(metadata: Mapping[str, Any], tensors: Mapping[str, Stored | Streamed]) -> int:
    """The bytes of a file of these, before it is written."""
    alignment = alignment_of(metadata)
    sizes = [sum(len(part) for part in _header(metadata, tensors)), *(tensor.num_bytes for tensor in tensors.values())]
    return sum(padded(size, alignment) for size in sizes)


def alignment_of(metadata: Mapping[str, Any]) -> int:
    """What the places of tensors in a file are multiples of."""
    return int(metadata.get("general.alignment", limits.DEFAULT_ALIGNMENT))


def padded(num_bytes: int, alignment: int) -> int:
    """The bytes a tensor takes in a file, with those up to the next one's place."""
    return -(-num_bytes // alignment) * alignment


def _alignment_only(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key == "general.alignment"}


def _write_all(
    files: Sequence[tuple[Path, Mapping[str, Any], Tensors]], progress: Callable[[int, int], None] | None
) -> list[Path]:
    """Write every file, then name them all."""
    with contextlib.ExitStack() as stack:
        written = []
        for target, metadata, tensors in files:
            new = NewFile(target.parent)
            stack.callback(new.close)
            write_gguf_to(new.file, metadata, tensors, progress=progress)
            written.append((new, target))
        for new, target in written:
            new.publish(target)
    return [target for _, target in written]


def _stored(name: str, tensor: npt.NDArray[Any] | Stored | Streamed) -> Stored | Streamed:
    if isinstance(tensor, Streamed):
        return tensor
    if isinstance(tensor, Stored):
        if tensor.data.nbytes != tensor.type.num_bytes(int(np.prod(tensor.shape, dtype=object))):
            raise FormatError(f"tensor {name!r} has {tensor.data.nbytes:,} bytes, not those of {tensor.shape}")
        return tensor
    if tensor.dtype not in _FLOATS:
        raise FormatError(f"tensor {name!r} has dtype {tensor.dtype}; give float32, float16 or Stored")
    return Stored.quantized(tensor, _FLOATS[tensor.dtype])


def _write_file(
    file: IO[bytes],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored | Streamed],
    progress: Callable[[int, int], None] | None,
) -> None:
    alignment = alignment_of(metadata)
    for part in _header(metadata, tensors):
        file.write(part)
    done, total = 0, sum(tensor.num_bytes for tensor in tensors.values())
    for tensor in tensors.values():
        file.write(bytes(-file.tell() % alignment))
        end = done + tensor.num_bytes
        for piece in tensor.pieces():
            file.write(np.ascontiguousarray(piece).data)
            done += piece.nbytes
            if progress is not None:
                progress(done, total)
        assert done == end, "the pieces of a tensor are not its bytes"
    file.write(bytes(-file.tell() % alignment))


def _header(metadata: Mapping[str, Any], tensors: Mapping[str, Stored | Streamed]) -> Iterator[bytes]:
    alignment, offset = alignment_of(metadata), 0
    yield struct.pack("<4sIQQ", b"GGUF", _VERSION, len(tensors), len(metadata))
    for key, value in metadata.items():
        yield _string(key) + _value(key, np.uint32(value) if key == "general.alignment" else value)
    for name, tensor in tensors.items():
        dimensions = tensor.shape[::-1]
        yield _string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        yield struct.pack("<IQ", tensor.type.id, offset)
        offset += padded(tensor.num_bytes, alignment)


def _string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: object) -> bytes:
    """The type and bytes of a value."""
    if isinstance(value, StoredValue):
        return value.data
    if isinstance(value, str | bytes):
        return struct.pack("<I", ValueType.STRING) + _string(value)
    if isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim == 1):
        return _array(key, value)
    number = _number(key, value)
    return struct.pack("<I", _TYPES[number.dtype]) + number.tobytes()


def _array(key: str, values: Sequence[Any] | npt.NDArray[Any]) -> bytes:
    if not isinstance(values, np.ndarray) and len(values) and all(isinstance(item, str | bytes) for item in values):
        head = struct.pack("<IIQ", ValueType.ARRAY, ValueType.STRING, len(values))
        return head + b"".join(map(_string, values))
    numbers = values.values if isinstance(values, NumberArray) else _numbers(key, values)
    head = struct.pack("<IIQ", ValueType.ARRAY, _TYPES[numbers.dtype], len(numbers))
    return head + numbers.tobytes()


def _number(key: str, value: object) -> npt.NDArray[Any]:
    if isinstance(value, np.generic):
        return _known(key, np.asarray(value))
    if isinstance(value, bool | int | float):
        return _smallest(key, np.asarray(value), (np.uint32, np.int32, np.int64, np.uint64))
    raise FormatError(f"{key!r} has the value {value!r}, which GGUF cannot hold")


def _numbers(key: str, values: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray):
        return _known(key, values)
    kinds = {type(item) for item in values}
    if not (kinds <= {int, float} or kinds == {bool}):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise FormatError(f"{key!r} is a list of {names}; give text, bool or numbers only")
    array = np.asarray(values, dtype=None if values else np.int32)
    return _smallest(key, array, (np.int32, np.int64, np.uint64))


def _smallest(key: str, numbers: npt.NDArray[Any], choices: tuple[type[np.integer[Any]], ...]) -> npt.NDArray[Any]:
    """Python numbers in the first type that holds them all."""
    if numbers.dtype.kind == "f":
        return numbers.astype("<f4")
    if numbers.dtype.kind == "b" or not numbers.size:
        return numbers
    low, high = int(numbers.min()), int(numbers.max())
    for choice in choices:
        if np.iinfo(choice).min <= low and high <= np.iinfo(choice).max:
            return numbers.astype(np.dtype(choice).newbyteorder("<"))
    raise FormatError(f"{key!r} has whole numbers from {low} to {high}; none of GGUF's types holds them")


def _known(key: str, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    little = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    if little.dtype not in _TYPES:
        raise FormatError(f"{key!r} has dtype {numbers.dtype}, which GGUF cannot hold")
    return little
