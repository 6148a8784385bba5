"""The key-value part of a GGUF file, read into Python values that own their bytes.

Scalars become int, float, bool and str; arrays up to MAX_LIST elements become lists, longer ones NumberArray and
StringArray, which are sequences as well. Text must be UTF-8, except in arrays: tokens may be any bytes, and bytes
that are not UTF-8 appear as lone surrogates (encode(errors="surrogateescape") gives them back).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvarn.formats.gguf import limits
from kvarn.formats.gguf.cursor import Cursor

Number = int | float | bool


class ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


class NumberArray(Sequence[Number]):
    """A long array of numbers, kept in the file's type; items are Python numbers."""

    __slots__ = ("values",)

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> Number: ...
    @overload
    def __getitem__(self, index: slice) -> list[Number]: ...
    def __getitem__(self, index: int | slice) -> Number | list[Number]:
        items: Number | list[Number] = self.values[index].tolist()
        return items

    def __iter__(self) -> Iterator[Number]:
        return iter(self.values.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype=dtype, copy=True) if copy else np.asarray(self.values, dtype=dtype)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"NumberArray({len(self)} x {self.values.dtype})"


class StringArray(Sequence[str]):
    """A long array of strings as one block of bytes; decoded when read, not before."""

    __slots__ = ("_data", "_ends")

    def __init__(self, data: bytes, ends: array[int]) -> None:
        self._data = data  # each string behind its 8-byte length
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        end = self._ends[index]
        position = index % len(self)
        begin = self._ends[position - 1] if position else 0
        return self._data[begin + 8 : end].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        data, begin = self._data, 0
        for end in self._ends:
            yield data[begin + 8 : end].decode("utf-8", "surrogateescape")
            begin = end

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


def read_metadata(cursor: Cursor, num_entries: int) -> dict[str, Any]:
    """Read all entries; the cursor is left behind the last."""
    metadata: dict[str, Any] = {}
    text_left = limits.MAX_TEXT_BYTES
    for _ in range(num_entries):
        begin = cursor.position
        key = cursor.text("a metadata key", limits.MAX_KEY_BYTES, min_bytes=1)
        if key in metadata:
            raise cursor.error(f"the metadata key {key!r} occurs twice", begin)
        type_ = _value_type(cursor, key)
        if key == "general.alignment" and type_ is not ValueType.UINT32:
            raise cursor.error(f"general.alignment has type {type_.name}, it must be UINT32", begin)
        text_left -= cursor.position - begin
        begin = cursor.position
        metadata[key] = value = _read_value(cursor, key, type_, text_left)
        if isinstance(value, str | list):
            text_left -= cursor.position - begin
        if text_left < 0:
            raise cursor.error(f"the metadata holds more than {limits.MAX_TEXT_BYTES:,} bytes of text", begin)
    return metadata


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value as a file holds it, its type before it: written again, it stays the same to the last bit."""

    data: bytes


def read_stored(cursor: Cursor, num_entries: int) -> dict[str, StoredValue]:
    """Read all entries without interpreting their values, with the checks of read_metadata."""
    found: dict[str, StoredValue] = {}
    for _ in range(num_entries):
        begin = cursor.position
        (key,) = read_metadata(cursor, 1)
        found[key] = StoredValue(cursor.buffer[begin + 8 + len(key.encode()) : cursor.position])
    return found


def _value_type(cursor: Cursor, key: str) -> ValueType:
    begin = cursor.position
    number = cursor.uint32(f"the type of {key!r}")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.error(f"{key!r} has the unknown value type {number}, 0 to 12 are known", begin) from None


def _read_value(cursor: Cursor, key: str, type_: ValueType, max_text: int) -> Any:
    if type_ is ValueType.STRING:
        return cursor.text(f"the text of {key!r}", max(max_text, 0))
    if type_ is ValueType.ARRAY:
        return _read_array(cursor, key, max_text)
    return _read_numbers(cursor, key, type_, 1)[0].item()


def _read_array(cursor: Cursor, key: str, max_text: int) -> list[Any] | NumberArray | StringArray:
    begin = cursor.position
    type_ = _value_type(cursor, key)
    count = cursor.uint64(f"the length of the array {key!r}")
    if type_ is ValueType.ARRAY:
        raise cursor.error(f"{key!r} is an array of arrays, which no model uses", begin)
    if type_ is ValueType.STRING:
        strings = _read_strings(cursor, key, count)
        is_short = count <= limits.MAX_LIST and cursor.position - begin <= max_text
        return list(strings) if is_short else strings
    numbers = _read_numbers(cursor, key, type_, count)
    return numbers.tolist() if count <= limits.MAX_LIST else NumberArray(numbers)


def _read_numbers(cursor: Cursor, key: str, type_: ValueType, count: int) -> npt.NDArray[Any]:
    dtype = DTYPES[type_]
    begin = cursor.position
    data = cursor.take(count * dtype.itemsize, f"{key!r} ({count:,} x {type_.name})")
    if type_ is ValueType.BOOL:
        bad = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) > 1)
        if len(bad):
            raise cursor.error(f"{key!r} has a bool that is neither 0 nor 1", begin + int(bad[0]))
    return np.frombuffer(data, dtype=dtype)


def _read_strings(cursor: Cursor, key: str, count: int) -> StringArray:
    if count > min(limits.MAX_STRINGS, cursor.num_left // 8):
        raise cursor.error(
            f"{key!r} claims {count:,} strings, {cursor.num_left:,} bytes are left in the file "
            f"and at most {limits.MAX_STRINGS:,} strings are allowed"
        )
    begin = cursor.position
    ends = array("Q", bytes(8 * count))
    end = _find_ends(cursor, key, ends)
    return StringArray(cursor.take(end - begin, key), ends)


def _find_ends(cursor: Cursor, key: str, ends: array[int]) -> int:
    """Fill ends with the offset, from the cursor, at which each string ends. A tight loop: vocabularies are long."""
    buffer, size, begin = cursor.buffer, cursor.size, cursor.position
    length_at = struct.Struct("<Q").unpack_from
    position = begin
    last = size - 8  # a length starts no later than this
    for i in range(len(ends)):
        if position > last:
            raise cursor.error(f"string {i:,} of {key!r} lies beyond the end of the file", begin)
        position += 8 + length_at(buffer, position)[0]
        if position > size:
            raise cursor.error(f"string {i:,} of {key!r} reaches beyond the end of the file", begin)
        ends[i] = position - begin
    return position
