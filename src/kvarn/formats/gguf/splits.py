"""Models in several GGUF files: name-00001-of-00003.gguf and so on, presented as one WeightSource.

The first part has the metadata; each part states its number (split.no, from 0), how many there are
(split.count) and how many tensors all parts hold together (split.tensors.count).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError, ModelNotFound
from kvarn.formats.gguf import limits
from kvarn.formats.gguf.metadata import StoredValue
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.weights import TensorInfo

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_path(path: str, number: int, count: int) -> str:
    """Name part `number` (from 1) of the model at path, which may name the whole or any part of it."""
    match = _PART.fullmatch(path)
    stem = match["stem"] if match else path.removesuffix(".gguf")
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def part_names(path: str) -> Iterator[str]:
    """All parts of the model of which path names one; the path itself where it names no part."""
    match = _PART.fullmatch(path)
    count = min(int(match["count"]), limits.MAX_PARTS) if match else 0
    yield from (part_path(path, number, count) for number in range(1, count + 1))
    if match is None:
        yield path


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile | SplitGGUF:
    """Open a GGUF file, with all its other parts if it is the first of several."""
    first = GGUFFile(path)
    try:
        count = _split_number(first, "split.count", default=1, maximum=limits.MAX_PARTS)
        if count <= 1:
            _refuse_lone_part(first)
            return first
        return SplitGGUF(first, count)
    except BaseException:
        first.close()
        raise


class SplitGGUF:
    """All parts of a split model as one WeightSource."""

    def __init__(self, first: GGUFFile, count: int) -> None:
        _check_name(first, count)
        self._parts = [first]
        try:
            for number in range(2, count + 1):
                self._parts.append(_open_part(first, number, count))
            self._owners = _owners(self._parts)
        except BaseException:
            self.close()
            raise
        self._tensors = {name: part.tensors[name] for name, part in self._owners.items()}

    @property
    def path(self) -> str:
        return self._parts[0].path

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(part.path for part in self._parts)

    @property
    def num_bytes(self) -> int:
        """Size of all parts."""
        return sum(part.num_bytes for part in self._parts)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._parts[0].metadata

    def stored_metadata(self) -> dict[str, StoredValue]:
        """The first part's metadata as the file holds it, without what makes it a part."""
        stored = self._parts[0].stored_metadata()
        return {key: value for key, value in stored.items() if not key.startswith("split.")}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return MappingProxyType(self._tensors)

    @property
    def conversions(self) -> tuple[str, ...]:
        """As of one file."""
        return tuple(dict.fromkeys(note for part in self._parts for note in part.conversions))

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self._owners[name].raw(name)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        return self._owners[name].array(name)

    def release_pages(self, names: Iterable[str]) -> None:
        for name in names:
            self._owners[name].release_pages((name,))

    def verify_unchanged(self) -> None:
        """Raise FormatError if any part changed since it was opened."""
        for part in self._parts:
            part.verify_unchanged()

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _split_number(part: GGUFFile, key: str, *, default: int | None, maximum: int) -> int:
    value = part.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise FormatError(f"{key} is {value!r}; a whole number from 0 to {maximum:,} is allowed", file=part.path)
    return value


def _refuse_lone_part(file: GGUFFile) -> None:
    match = _PART.fullmatch(os.path.basename(file.path))
    if match and int(match["count"]) > 1:
        raise FormatError(
            f"the file is named as part {int(match['number'])} of {int(match['count'])}, but its metadata "
            "has no split.count; rename it if it is whole",
            file=file.path,
        )


def _check_name(first: GGUFFile, count: int) -> None:
    number = _split_number(first, "split.no", default=None, maximum=count - 1) + 1
    if first.path != part_path(first.path, number, count):
        expected = os.path.basename(part_path(first.path, number, count))
        raise FormatError(f"this is part {number} of {count}, so its name must be {expected}", file=first.path)
    if number != 1:
        first_name = part_path(first.path, 1, count)
        raise FormatError(f"this is part {number} of {count}; open the first part, {first_name}", file=first.path)


def _open_part(first: GGUFFile, number: int, count: int) -> GGUFFile:
    path = part_path(first.path, number, count)
    if not os.path.exists(path):
        raise ModelNotFound(f"{path}: part {number} of {count} is missing; download all parts into one folder")
    part = GGUFFile(path)
    try:
        stated_count = _split_number(part, "split.count", default=None, maximum=limits.MAX_PARTS)
        stated_number = _split_number(part, "split.no", default=None, maximum=limits.MAX_PARTS) + 1
        if (stated_number, stated_count) != (number, count):
            raise FormatError(
                f"expected part {number} of {count}, the file says part {stated_number} of {stated_count}", file=path
            )
    except BaseException:
        part.close()
        raise
    return part


def _owners(parts: list[GGUFFile]) -> dict[str, GGUFFile]:
    owners: dict[str, GGUFFile] = {}
    for part in parts:
        for name in part.tensors:
            if name in owners:
                raise FormatError(f"tensor {name!r} is also in {owners[name].path}", file=part.path)
            owners[name] = part
    maximum = limits.MAX_TENSORS * limits.MAX_PARTS
    expected = _split_number(parts[0], "split.tensors.count", default=len(owners), maximum=maximum)
    if expected != len(owners):
        raise FormatError(
            f"split.tensors.count is {expected:,}, all {len(parts)} parts together hold {len(owners):,} tensors; "
            "the parts do not belong together",
            file=parts[0].path,
        )
    return owners
