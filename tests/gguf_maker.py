"""GGUF files as byte strings, piece by piece, so that any piece can be wrong.

`gguf()` puts a file together; every count, length, type and offset can be overridden. `tiny()` is a valid file with
every kind of metadata; `broken()` is one file for each way to be wrong that a reader must refuse.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
F32, F16, Q4_0, Q8_0, Q4_K, Q8_K = 0, 1, 2, 8, 12, 15
CODES = dict(zip(range(13), "BbHhIif?..Qqd", strict=True))


def string(text: str | bytes, *, length: int | None = None) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(key: str | bytes, type_: int, value: object) -> bytes:
    """One metadata entry with a scalar or text value."""
    return string(key) + struct.pack("<I", type_) + scalar(type_, value)


def scalar(type_: int, value: object) -> bytes:
    return string(value) if type_ == STRING else struct.pack("<" + CODES[type_], value)  # type: ignore[arg-type]


def array_entry(
    key: str, type_: int, values: Sequence[object] = (), *, count: int | None = None, data: bytes | None = None
) -> bytes:
    """One metadata entry with an array; data replaces the bytes of the values."""
    head = struct.pack("<IIQ", ARRAY, type_, len(values) if count is None else count)
    return string(key) + head + (b"".join(scalar(type_, value) for value in values) if data is None else data)


@dataclass(frozen=True)
class Tensor:
    """Dimensions in the file's order: the contiguous one first. offset None: behind the tensor before."""

    name: str | bytes = "t.weight"
    dimensions: tuple[int, ...] = (32, 2)
    type: int = F32
    data: bytes = bytes(256)
    offset: int | None = None
    num_dimensions: int | None = None
    name_length: int | None = None

    def info(self, offset: int) -> bytes:
        count = len(self.dimensions) if self.num_dimensions is None else self.num_dimensions
        shape = struct.pack(f"<I{len(self.dimensions)}Q", count, *self.dimensions)
        place = offset if self.offset is None else self.offset
        return string(self.name, length=self.name_length) + shape + struct.pack("<IQ", self.type, place)


def gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; alignment only places the data, it writes no entry."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries)
    data = b""
    for tensor in tensors:
        head += tensor.info(len(data))
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    return head + (bytes(-len(head) % alignment) + data if tensors else b"")


def tiny() -> bytes:
    """A valid file: all value types, a long array of each kind, three tensors."""
    numbers = [(UINT8, 255), (INT8, -128), (UINT16, 65535), (INT16, -32768), (UINT32, 2**32 - 1), (INT32, -(2**31))]
    numbers += [(FLOAT32, 0.5), (BOOL, True), (UINT64, 2**64 - 1), (INT64, -(2**63)), (FLOAT64, 0.1)]
    entries = [entry("general.architecture", STRING, "tiny"), entry("general.alignment", UINT32, 32)]
    entries += [entry(f"number.{type_}", type_, value) for type_, value in numbers]
    entries += [array_entry(f"numbers.{type_}", type_, [value] * 3) for type_, value in numbers]
    entries += [array_entry("long.numbers", INT32, list(range(300)))]
    entries += [array_entry("short.strings", STRING, ["a", "ö", ""])]
    entries += [array_entry("long.strings", STRING, [f"token {i}" for i in range(300)])]
    values = struct.pack("<64f", *(i / 8 for i in range(64)))
    tensors = [
        Tensor("a.weight", (32, 2), F32, values),
        Tensor("b.weight", (64,), Q8_0, bytes(range(68))),
        Tensor("c.weight", (2, 1, 3), F16, bytes(12)),
    ]
    return gguf(entries, tensors)


def broken() -> dict[str, tuple[bytes, str]]:
    """Files a reader must refuse, each with a piece of the message that says why."""
    return {**_broken_headers(), **_broken_entries(), **_broken_alignments(), **_broken_tensors(), **_broken_data()}


def _broken_headers() -> dict[str, tuple[bytes, str]]:
    return {
        "magic": (gguf(magic=b"GGML"), "not a GGUF file"),
        "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        "three bytes": (b"GGU", "truncated"),
        "only a magic": (b"GGUF", "truncated"),
        "version 0": (gguf(version=0), "version 0 is not supported"),
        "version 1": (gguf(version=1), "version 1 is not supported"),
        "version 4": (gguf(version=4), "version 4 is not supported"),
        "big-endian": (gguf(version=0x03000000), "big-endian"),
        "tensor count over the limit": (gguf(num_tensors=2**63), "9,223,372,036,854,775,808 tensors"),
        "tensor count over the file": (gguf(num_tensors=100), "100 tensors"),
        "entry count over the limit": (gguf(num_entries=2**64 - 1), "metadata entries"),
        "entry count over the file": (gguf(num_entries=50), "50 metadata entries"),
        "one entry too many": (gguf([entry("a", UINT32, 1)], [Tensor()], num_entries=2), ""),
    }


def _broken_entries() -> dict[str, tuple[bytes, str]]:
    key = string("k")
    filler = entry("filler", STRING, "x" * 64)
    text = key + struct.pack("<I", STRING)

    def one(data: bytes) -> bytes:
        return gguf([data, filler])

    return {
        "key length 2^63": (one(string("k", length=2**63)), "a metadata key has"),
        "key over the file": (one(string("k", length=60_000)), "truncated"),
        "key empty": (one(entry("", UINT32, 1)), "a metadata key has 0 bytes"),
        "key not UTF-8": (one(entry(b"\xff\xfe", UINT32, 1)), "not UTF-8"),
        "key twice": (gguf([entry("k", UINT32, 1), entry("k", UINT32, 2)]), "occurs twice"),
        "value type 13": (one(key + struct.pack("<IQ", 13, 0)), "unknown value type 13"),
        "value type 2^32 - 1": (one(key + struct.pack("<IQ", 2**32 - 1, 0)), "unknown value type"),
        "text length 2^63": (one(text + string("v", length=2**63)), "the text of 'k' has"),
        "text over the file": (one(text + string("v", length=2**20)), "truncated"),
        "text not UTF-8": (one(entry("k", STRING, b"\xc3\x28")), "not UTF-8"),
        "bool of 2": (one(key + struct.pack("<IB", BOOL, 2)), "neither 0 nor 1"),
        **_broken_arrays(),
    }


def _broken_arrays() -> dict[str, tuple[bytes, str]]:
    def one(type_: int, data: bytes, count: int) -> bytes:
        return gguf([array_entry("k", type_, data=data, count=count)])

    three = bytes([1, 0, 2])
    return {
        "bool of 2 in an array": (one(BOOL, three, 3), "neither 0 nor 1"),
        "array of arrays": (one(ARRAY, bytes(32), 1), "array of arrays"),
        "array type 99": (one(99, bytes(32), 1), "unknown value type 99"),
        "array count 2^64 - 1": (one(UINT64, bytes(8), 2**64 - 1), "truncated"),
        "array count that wraps": (one(UINT64, bytes(8), 2**61 + 1), "truncated"),
        "array wider than its bytes": (one(UINT64, three, 3), "truncated"),
        "string count 2^63": (one(STRING, string("a"), 2**63), "strings"),
        "string count over the file": (one(STRING, string("a"), 1000), "strings"),
        "string over the file": (one(STRING, string("a") + string("b" * 30, length=31), 2), "beyond the end"),
        "string length 2^64 - 1": (one(STRING, string("a" * 16, length=2**64 - 1), 1), "beyond the end"),
        "length over the end": (one(STRING, string("a" * 24, length=30) + string(""), 2), "beyond the end"),
    }


def _broken_alignments() -> dict[str, tuple[bytes, str]]:
    def aligned(type_: int, value: object, place: int = 32) -> bytes:
        return gguf([entry("general.alignment", type_, value)], [Tensor()], alignment=place)

    return {
        "alignment 0": (aligned(UINT32, 0), "general.alignment is 0"),
        "alignment 13": (aligned(UINT32, 13), "general.alignment is 13"),
        "alignment 2^31": (aligned(UINT32, 2**31), "general.alignment is 2147483648"),
        "alignment as UINT64": (aligned(UINT64, 32), "it must be UINT32"),
        "alignment as text": (aligned(STRING, "32"), "it must be UINT32"),
        "alignment other than the offsets": (
            gguf([entry("general.alignment", UINT32, 64)], [Tensor(), Tensor("u", (8,), data=bytes(32), offset=288)]),
            "not a multiple of 64",
        ),
    }


def _broken_tensors() -> dict[str, tuple[bytes, str]]:
    def one(**changes: object) -> bytes:
        return gguf([], [Tensor(**changes)])  # type: ignore[arg-type]

    return {
        "name empty": (one(name=""), "a tensor name has 0 bytes"),
        "name of 65 bytes": (one(name="n" * 65), "a tensor name has 65 bytes"),
        "name length 2^63": (one(name_length=2**63), "a tensor name has"),
        "name not UTF-8": (one(name=b"\x80"), "not UTF-8"),
        "name twice": (gguf([], [Tensor(), Tensor()]), "occurs twice"),
        "5 dimensions": (one(dimensions=(2, 2, 2, 2, 2)), "5 dimensions"),
        "2^32 - 1 dimensions": (one(num_dimensions=2**32 - 1), "4,294,967,295 dimensions"),
        "dimension 0": (one(dimensions=(0, 2)), "shape [0, 2]"),
        "dimension negative": (one(dimensions=(2**64 - 32, 2)), "shape"),
        "dimension over 2^31": (one(dimensions=(2**31, 1)), "shape"),
        "product wraps to 0": (one(dimensions=(2**30, 2**30, 2**4, 1)), "truncated"),
        "product wraps to a small number": (one(dimensions=(2**42 + 1, 2**22, 1, 1)), "shape"),
        "bytes wrap": (one(dimensions=(2**30, 2**30, 2**2)), "truncated"),
        "row not whole blocks": (one(dimensions=(31, 2), type=Q4_0), "not a multiple of Q4_0's 32"),
        "row not whole super-blocks": (one(dimensions=(32, 8), type=Q4_K), "not a multiple of Q4_K's 256"),
        "type not supported": (one(type=Q8_K), "'t.weight' is stored as Q8_K"),
        "type removed": (one(type=4), "the unknown type 4"),
        "type unknown": (one(type=2**32 - 1), "the unknown type 4294967295"),
    }


def _broken_data() -> dict[str, tuple[bytes, str]]:
    second = Tensor("u.weight", (32, 2), F32, bytes(256))
    return {
        "offset not aligned": (gguf([], [Tensor(offset=4)]), "not a multiple of 32"),
        "offset over the file": (gguf([], [Tensor(offset=2**20)]), "truncated"),
        "offset 2^64 - 32": (gguf([], [Tensor(offset=2**64 - 32)]), "truncated"),
        "offset + size over the file": (gguf([], [Tensor(offset=32)]), "truncated"),
        "tensors overlap": (gguf([], [Tensor(), Tensor("u.weight", offset=224)]), "overlap"),
        "tensors at one place": (gguf([], [second, Tensor(offset=0)]), "overlap"),
        "no data": (gguf([], [Tensor(data=b"")]), "truncated"),
        "one byte short": (gguf([], [Tensor()])[:-1], "truncated"),
        "tensor info cut": (gguf([], [Tensor()])[:40], "truncated"),
    }
