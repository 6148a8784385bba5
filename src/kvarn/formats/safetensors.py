"""Hugging Face folders with safetensors weights, as a WeightSource under their Hugging Face names.

Reads config.json, model.safetensors or the shards of model.safetensors.index.json. Data only: no pickle, no code
from the folder. A safetensors file is an 8-byte length, a JSON header {name: {dtype, shape, data_offsets}} and
the tensors, one after another without gaps.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.checks import short
from kvarn.errors import FormatError, ModelNotFound, UnsupportedModel
from kvarn.formats.mapped_file import DAMAGED, MappedFile
from kvarn.formats.open import PICKLE_SUFFIXES
from kvarn.formats.quantized_folders.matrix import StoredTensor
from kvarn.formats.quantized_folders.methods import KEYS, find_quantized
from kvarn.formats.quants import dequantize
from kvarn.formats.strict_json import MAX_JSON_BYTES, parse_object, read_object
from kvarn.formats.weights import Float8Matrix, TensorInfo, TensorType

_TYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
}
# Integer buffers that some checkpoints carry and no model reads: they are left out.
_BUFFERS = ("position_ids", "token_type_ids", "num_batches_tracked")
_NUMPY = {"BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "I32": "<i4", "I64": "<i8"}  # that methods read
_MAX_DIMENSIONS = 8
_MAX_DIMENSION = 2**31 - 1
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DENSE = re.compile(r"[2-9]_Dense")


class SafetensorsFile:
    """One safetensors file: where each tensor lies."""

    def __init__(self, path: str, prefix: str = "") -> None:
        self.file = MappedFile(path)
        self._prefix = prefix  # of all names
        self.tensors: dict[str, TensorInfo] = {}
        self.others: dict[str, StoredTensor] = {}  # of types that only a method of quantisation reads
        self.offsets: dict[str, int] = {}
        try:
            self._parse()
        except BaseException:
            self.file.close()
            raise

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.file.view(*self.range(name))

    def range(self, name: str) -> tuple[int, int]:
        """Where the bytes of a tensor begin, and how many there are."""
        other = self.others.get(name)
        if other is None:
            return self.offsets[name], self.tensors[name].num_bytes
        return self.offsets[name], math.prod(other.shape) * _BITS[other.dtype] // 8

    def _parse(self) -> None:
        size = self.file.size
        length = int.from_bytes(self.file.buffer[:8], "little")
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            raise self._error(
                f"the header claims {length:,} bytes; the file has {size:,}, {MAX_JSON_BYTES:,} are allowed"
            )
        header = parse_object(self.file.buffer[8 : 8 + length], self.file.path)
        header.pop("__metadata__", None)
        header = {self._prefix + name: entry for name, entry in header.items()}
        entries = sorted((self._offsets_of(name, entry), name) for name, entry in header.items())
        end = 0
        for (begin, stop), name in entries:
            if begin != end:
                raise self._error(f"tensor {name!r} begins at {begin:,}, the one before ends at {end:,}", begin)
            self._add(name, header[name], begin, stop, 8 + length)
            end = stop
        if end != size - 8 - length:
            raise self._error(f"the tensors end at {end:,}, the file holds {size - 8 - length:,} bytes of them")

    def _offsets_of(self, name: str, entry: object) -> tuple[int, int]:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._error(f"tensor {name!r} needs exactly dtype, shape and data_offsets")
        offsets = entry["data_offsets"]
        if not _are_integers(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= self.file.size:
            raise self._error(f"tensor {name!r} has the data_offsets {short(offsets)}, which are not in the file")
        return offsets[0], offsets[1]

    def _add(self, name: str, entry: dict[str, Any], begin: int, end: int, data_begin: int) -> None:
        dtype, shape = entry["dtype"], entry["shape"]
        if not _are_integers(shape) or len(shape) > _MAX_DIMENSIONS or not all(0 <= n <= _MAX_DIMENSION for n in shape):
            raise self._error(f"tensor {name!r} has the shape {short(shape)}")
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise UnsupportedModel(f"{self.file.path}: tensor {name!r} has the unknown type {short(dtype)}")
        if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
            raise self._error(f"tensor {name!r} has {end - begin:,} bytes, not those of {dtype} {shape}", begin)
        if dtype in _TYPES and 0 not in shape:
            self.tensors[name] = TensorInfo(name, _TYPES[dtype], tuple(shape))
            self.offsets[name] = data_begin + begin
        elif not name.endswith(_BUFFERS):
            self.others[name] = StoredTensor(dtype, tuple(shape))
            self.offsets[name] = data_begin + begin

    def _error(self, message: str, offset: int | None = None) -> FormatError:
        return FormatError(f"{message}; {DAMAGED}", file=self.file.path, offset=offset)


class SafetensorsFolder:
    """A Hugging Face model folder as a WeightSource. Arrays from raw() stay valid after close()."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        names = _weight_files(self._path)
        self._config = read_object(self._join("config.json"))
        self._files: list[SafetensorsFile] = []
        self._owners: dict[str, SafetensorsFile] = {}
        try:
            self._open(names)
        except BaseException:
            self.close()
            raise

    def _open(self, files: Mapping[str, frozenset[str] | None]) -> None:
        for file, expected in files.items():
            folder = os.path.dirname(file)
            shard = SafetensorsFile(self._join(file), f"{folder}." if folder else "")
            self._files.append(shard)
            missing = sorted((expected or frozenset()) - shard.offsets.keys())
            missing = [name for name in missing if not name.endswith(_BUFFERS)]
            if missing:
                raise FormatError(f"tensor {missing[0]!r} is not here, though {_INDEX} says so", file=shard.file.path)
            for name in shard.offsets:
                if name in self._owners:
                    raise FormatError(f"tensor {name!r} is also in another shard", file=shard.file.path)
                self._owners[name] = shard
        self._tensors = {name: shard.tensors[name] for name, shard in self._owners.items() if name in shard.tensors}
        self._add_quantized()

    def _add_quantized(self) -> None:
        """Let the method that config.json names make tensors of those it has stored; what is left must be floats."""
        names = {type_: name for name, type_ in _TYPES.items()}
        stored = {name: StoredTensor(names[info.type], info.shape) for name, info in self._tensors.items()}
        others = {name: one for shard in self._files for name, one in shard.others.items()}
        self._quantized = find_quantized(self._path, self._config, stored | others, self._read)
        made = self._quantized.tensors
        used = {part for one in made.values() for part in one.parts} | self._quantized.unread
        for name in sorted(others.keys() - used):
            raise UnsupportedModel(
                f"{self._owners[name].file.path}: tensor {name!r} is {others[name]}; F32, F16 and BF16 with at "
                "least one value can be read, so convert the model to one of them",
                fields=("tensor_type",),
            )
        self._tensors = {name: info for name, info in self._tensors.items() if name not in used}
        self._tensors |= {name: one.info for name, one in made.items()}
        config = {key: value for key, value in self._config.items() if key not in KEYS} if made else self._config
        self._metadata = {"hf": config, "hf_folder": self._path}

    def _read(self, name: str) -> npt.NDArray[Any]:
        """A stored tensor as a method reads it."""
        owner = self._owners[name]
        if name in owner.tensors:
            info = owner.tensors[name]
            return dequantize(owner.raw(name), info.type, info.shape)
        other = owner.others[name]
        if other.dtype not in _NUMPY:
            raise UnsupportedModel(f"{self._path}: tensor {name!r} is {other.dtype}, which no method reads")
        return owner.raw(name).view(_NUMPY[other.dtype]).reshape(other.shape)

    @property
    def conversions(self) -> tuple[str, ...]:
        """What quantised weights are run as, for the user to know."""
        return self._quantized.notes

    @property
    def path(self) -> str:
        return self._path

    @property
    def num_bytes(self) -> int:
        """Size of all weight files."""
        return sum(shard.file.size for shard in self._files)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return MappingProxyType(self._metadata)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return MappingProxyType(self._tensors)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        made = self._quantized.tensors.get(name)
        return self._owners[name].raw(name) if made is None else made.raw()

    def float8(self, name: str) -> Float8Matrix | None:
        made = self._quantized.tensors.get(name)
        return None if made is None else made.float8

    def array(self, name: str) -> npt.NDArray[np.float32]:
        made, info = self._quantized.tensors.get(name), self._tensors[name]
        return dequantize(self.raw(name), info.type, info.shape) if made is None else made.array()

    def release_pages(self, names: Iterable[str]) -> None:
        made = self._quantized.tensors
        for part in (part for name in names for part in (made[name].parts if name in made else (name,))):
            self._owners[part].file.release_pages([self._owners[part].range(part)])

    def verify_unchanged(self) -> None:
        """Raise FormatError if a weight file changed since it was opened."""
        for shard in self._files:
            shard.file.verify_unchanged()

    def close(self) -> None:
        for shard in self._files:
            shard.file.close()

    def _join(self, name: str) -> str:
        return os.path.join(self._path, name)


def _weight_files(folder: str) -> dict[str, frozenset[str] | None]:
    """The weight files of a folder, each with the tensors the index expects in it."""
    present = set(_listing(folder))
    if "config.json" not in present:
        raise ModelNotFound(f"{folder}: the folder has no config.json{_what_else(present)}")
    if _INDEX in present:
        return _shards(os.path.join(folder, _INDEX), present) | _dense_files(folder, present)
    if _SINGLE in present:
        return {_SINGLE: None} | _dense_files(folder, present)
    raise ModelNotFound(f"{folder}: the folder has no {_SINGLE}{_what_else(present)}")


def _dense_files(folder: str, present: set[str]) -> dict[str, frozenset[str] | None]:
    """Of the layers that sentence-transformers puts behind an encoder, each in a folder of its own."""
    files = [os.path.join(name, _SINGLE) for name in sorted(present) if _DENSE.fullmatch(name)]
    return {file: None for file in files if os.path.isfile(os.path.join(folder, file))}


def _listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFound(f"{folder!r} cannot be listed: {reason}; give the path of a model folder") from error


def _what_else(present: set[str]) -> str:
    pickles = sorted(name for name in present if name.endswith(PICKLE_SUFFIXES))
    if pickles:
        return f"; pickle files such as {pickles[0]} are not read, because they can run code: convert to safetensors"
    ggufs = sorted(name for name in present if name.endswith(".gguf"))
    if ggufs:
        return f"; give the path of a file in it, such as {ggufs[0]}"
    return "; give a GGUF file or a Hugging Face folder with safetensors"


def _shards(path: str, present: set[str]) -> dict[str, frozenset[str] | None]:
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError("weight_map is missing or empty", file=path)
    shards: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise FormatError(f"tensor {tensor!r} is said to be in {short(file)}, not a file of this folder", file=path)
        if file not in present:
            raise ModelNotFound(f"{path}: the shard {file} is missing; download all files of the model")
        shards.setdefault(file, set()).add(tensor)
    return {file: frozenset(names) for file, names in sorted(shards.items())}


def _are_integers(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
