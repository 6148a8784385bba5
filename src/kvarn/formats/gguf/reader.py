"""GGUF files, versions 2 and 3: metadata and tensors over a memory map.

Strict, because model files are hostile input: a file is either what it claims to be in every count, length,
offset, type and alignment, or a FormatError says where it is not. The limits are in limits.py.

    header   magic "GGUF", version, number of tensors, number of metadata entries
    entries  key, type, value                         -> metadata.py
    infos    name, dimensions, type, offset           -> here
    data     begins at the next multiple of the alignment; offsets count from there
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.errors import UnsupportedModel
from kvarn.formats.gguf import limits
from kvarn.formats.gguf.cursor import Cursor
from kvarn.formats.gguf.metadata import StoredValue, read_metadata, read_stored
from kvarn.formats.mapped_file import MappedFile
from kvarn.formats.quants import dequantize
from kvarn.formats.stored_types.table import STORED_TYPES, StoredType
from kvarn.formats.weights import TensorInfo, TensorType

MAGIC = b"GGUF"
_TYPES = {type_.id: type_ for type_ in TensorType}

# ggml's types that are not read here, to name them in the refusal.
_OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}


class GGUFFile:
    """One GGUF file as a WeightSource. Arrays from raw() stay valid after close(); the metadata is a copy."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = MappedFile(path)
        try:
            self._parse(Cursor(self._file.buffer, self._file.size, self._file.path))
        except BaseException:
            self._file.close()
            raise

    def _parse(self, cursor: Cursor) -> None:
        num_tensors, num_entries = _read_header(cursor)
        metadata = read_metadata(cursor, num_entries)
        alignment = _alignment(cursor, metadata)
        tensors, offsets, self._stored = _read_tensors(cursor, num_tensors, alignment)
        self._tensors = tensors
        data_begin = -(-cursor.position // alignment) * alignment
        _check_data(cursor, {name: self._stored_bytes(name) for name in tensors}, offsets, data_begin)
        self._metadata = metadata
        self._offsets = offsets
        self._data_begin = data_begin

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._file.size

    @property
    def metadata(self) -> Mapping[str, Any]:
        return MappingProxyType(self._metadata)

    def stored_metadata(self) -> dict[str, StoredValue]:
        """The metadata as the file holds it, to be written into another file."""
        cursor = Cursor(self._file.buffer, self._file.size, self._file.path)
        _, num_entries = _read_header(cursor)
        return read_stored(cursor, num_entries)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return MappingProxyType(self._tensors)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        stored, kind = self._file.view(*self._range(name)), self._stored.get(name)
        return stored if kind is None else kind.converted(stored, name)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        info, kind = self._tensors[name], self._stored.get(name)
        if kind is not None:
            return kind.decoded(self._file.view(*self._range(name))).reshape(info.shape)
        return dequantize(self.raw(name), info.type, info.shape)

    @property
    def conversions(self) -> tuple[str, ...]:
        """What the types without kernels are run as, for the user to know."""
        return tuple(kind.note for kind in STORED_TYPES.values() if kind in self._stored.values())

    def release_pages(self, names: Iterable[str]) -> None:
        self._file.release_pages(self._range(name) for name in names)

    def verify_unchanged(self) -> None:
        """Raise FormatError if the file changed since it was opened; call it when everything was read."""
        self._file.verify_unchanged()

    def close(self) -> None:
        self._file.close()

    def _range(self, name: str) -> tuple[int, int]:
        return self._data_begin + self._offsets[name], self._stored_bytes(name)

    def _stored_bytes(self, name: str) -> int:
        info = self._tensors[name]
        kind = self._stored.get(name)
        return info.num_bytes if kind is None else kind.num_bytes(math.prod(info.shape))


def _read_header(cursor: Cursor) -> tuple[int, int]:
    magic = cursor.take(4, "the magic number")
    if magic != MAGIC:
        remedy = "give the path of a .gguf file"
        raise cursor.error(f"this is not a GGUF file: it begins with {magic!r}", 0, remedy=remedy)
    version = cursor.uint32("the version")
    if version not in limits.VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in limits.VERSIONS
        remedy = "the file is big-endian, convert it to little-endian" if swapped else "convert the model again"
        raise cursor.error(f"GGUF version {version} is not supported, versions 2 and 3 are", 4, remedy=remedy)
    num_tensors = _count(cursor, "tensors", limits.MAX_TENSORS, limits.MIN_TENSOR_BYTES)
    num_entries = _count(cursor, "metadata entries", limits.MAX_ENTRIES, limits.MIN_ENTRY_BYTES)
    return num_tensors, num_entries


def _count(cursor: Cursor, what: str, maximum: int, min_bytes: int) -> int:
    begin = cursor.position
    count = cursor.uint64(f"the number of {what}")
    if count > maximum:
        raise cursor.error(f"the file claims {count:,} {what}, at most {maximum:,} are allowed", begin)
    if count * min_bytes > cursor.num_left:
        raise cursor.error(f"the file claims {count:,} {what}, but has only {cursor.num_left:,} bytes left", begin)
    return count


def _alignment(cursor: Cursor, metadata: Mapping[str, Any]) -> int:
    alignment: int = metadata.get("general.alignment", limits.DEFAULT_ALIGNMENT)
    in_range = limits.MIN_ALIGNMENT <= alignment <= limits.MAX_ALIGNMENT
    if not in_range or alignment & (alignment - 1):
        raise cursor.error(
            f"general.alignment is {alignment}, a power of two from {limits.MIN_ALIGNMENT} to "
            f"{limits.MAX_ALIGNMENT:,} is allowed"
        )
    return alignment


def _read_tensors(
    cursor: Cursor, count: int, alignment: int
) -> tuple[dict[str, TensorInfo], dict[str, int], dict[str, StoredType]]:
    """Read what the tensors are, where they are, and of which types those are that are converted when read."""
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    converted: dict[str, StoredType] = {}
    for _ in range(count):
        begin = cursor.position
        name = cursor.text("a tensor name", limits.MAX_NAME_BYTES, min_bytes=1)
        if name in tensors:
            raise cursor.error(f"the tensor name {name!r} occurs twice", begin)
        dimensions = _read_dimensions(cursor, name)
        type_ = _read_type(cursor, name, dimensions)
        if isinstance(type_, StoredType):
            converted[name] = type_
            type_ = type_.target
        offset = cursor.uint64(f"the offset of {name!r}")
        if offset % alignment:
            raise cursor.error(f"tensor {name!r} begins at {offset:,}, not a multiple of {alignment}", begin)
        tensors[name] = TensorInfo(name, type_, tuple(reversed(dimensions)))
        offsets[name] = offset
    return tensors, offsets, converted


def _read_dimensions(cursor: Cursor, name: str) -> list[int]:
    """Read the sizes in the file's order: the contiguous dimension first."""
    begin = cursor.position
    count = cursor.uint32(f"the number of dimensions of {name!r}")
    if count > limits.MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {count:,} dimensions, at most 4 are allowed", begin)
    dimensions = [cursor.uint64(f"a dimension of {name!r}") for _ in range(count)]
    if not all(1 <= size <= limits.MAX_DIMENSION for size in dimensions):
        raise cursor.error(f"tensor {name!r} has the shape {dimensions}, each size must be 1 to 2^31 - 1", begin)
    return dimensions


def _read_type(cursor: Cursor, name: str, dimensions: list[int]) -> TensorType | StoredType:
    begin = cursor.position
    number = cursor.uint32(f"the type of {name!r}")
    type_ = _TYPES.get(number) or STORED_TYPES.get(number)
    if type_ is None:
        known = _OTHER_TYPES.get(number, f"the unknown type {number}")
        raise UnsupportedModel(
            f"{cursor.file}: tensor {name!r} is stored as {known}, which cannot be read; "
            f"use a file with {', '.join(one.name for one in (*TensorType, *STORED_TYPES.values()))}",
            fields=("tensor_type",),
        )
    row = dimensions[0] if dimensions else 1
    if row % type_.block_values:
        raise cursor.error(
            f"tensor {name!r} has rows of {row:,} values, not a multiple of {type_.name}'s {type_.block_values}", begin
        )
    return type_


def _check_data(cursor: Cursor, sizes: Mapping[str, int], offsets: Mapping[str, int], data_begin: int) -> None:
    """Every tensor lies in the file, and no two share a byte."""
    end, before = data_begin, ""
    for name in sorted(offsets, key=offsets.__getitem__):
        begin = data_begin + offsets[name]
        num_bytes = sizes[name]
        if begin + num_bytes > cursor.size:
            raise cursor.error(
                f"tensor {name!r} ends at {begin + num_bytes:,}, the file has {cursor.size:,} bytes", begin
            )
        if begin < end:
            raise cursor.error(f"tensors {before!r} and {name!r} overlap", begin)
        end, before = begin + num_bytes, name
