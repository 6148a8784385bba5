"""Weights in another type or order than they are stored in, converted when loaded.

RearrangedWeights: floats in another order. FilledWeights: ones where nothing is stored. Q8Weights: floats as Q8_0, a
quarter of the memory, and int8 kernels for float ones. DenseWeights: everything as floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.weight_proxy import WeightProxy
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource, float8_of

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)


class Q8Weights(WeightProxy):
    """A WeightSource whose layers' float matrices appear as Q8_0; embeddings, norms and biases stay as they are."""

    def __init__(self, source: WeightSource) -> None:
        matrices = {name: info for name, info in source.tensors.items() if _is_requantized(info)}
        super().__init__(source, {name: replace(info, type=TensorType.Q8_0) for name, info in matrices.items()})

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        return quantize(self._source.array(name), TensorType.Q8_0)

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        return dequantize(self.raw(name), TensorType.Q8_0, self.tensors[name].shape)


class DenseWeights(WeightProxy):
    """A WeightSource whose matrices appear as type, one of the float types; norms and biases stay as they are, and so
    do matrices of the types in kept, and with float8_bytes those stored in FP8, but for stacks of them and the inputs
    of layers. kept, float8_bytes: bytes of a value."""

    def __init__(
        self,
        source: WeightSource,
        type: TensorType,
        kept: Mapping[TensorType, float] | None = None,
        float8_bytes: float | None = None,
    ) -> None:
        self._type = type
        self.stored = source  # as the file has them
        self.kept = kept = kept or {}
        self._float8_bytes = float8_bytes
        matrices = {
            name: info
            for name, info in source.tensors.items()
            if len(info.shape) > 1
            and info.type != type
            and (len(info.shape) > 2 or info.type not in kept or name.startswith("per_layer_"))
        }
        keeps = float8_bytes is not None
        self.float8_names = frozenset(name for name in matrices if keeps and _is_float8(source, name))
        super().__init__(source, {name: replace(info, type=type) for name, info in matrices.items()})

    @property
    def held_bytes(self) -> int:
        """What is held in memory, where kept types may take other bytes than in the file."""
        return sum(map(self._held_bytes, self.tensors.values()))

    def _held_bytes(self, info: TensorInfo) -> int:
        if info.name in self.float8_names and self._float8_bytes is not None:
            return int(self._float8_bytes * info.num_values)
        return int(self.kept[info.type] * info.num_values) if info.type in self.kept else info.num_bytes

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        return quantize(self._source.array(name), self._type)

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        return self._source.array(name)


@dataclass(frozen=True, slots=True)
class Rearranged:
    """A tensor made of another one: order gets and gives values of the stored type, the bytes of quantised rows."""

    info: TensorInfo
    origin: str
    order: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


class RearrangedWeights(WeightProxy):
    """A WeightSource with tensors that are others in another order; the originals stay too."""

    def __init__(self, source: WeightSource, made: Mapping[str, Rearranged]) -> None:
        self._made = made
        super().__init__(source, {name: one.info for name, one in made.items()})

    def release_pages(self, names: Iterable[str]) -> None:
        self._source.release_pages({self._made[name].origin if name in self._made else name for name in names})

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        one = self._made[name]
        stored = self._source.tensors[one.origin]
        unit = {TensorType.F32: np.uint32, TensorType.F16: np.uint16, TensorType.BF16: np.uint16}.get(
            stored.type, np.uint8
        )
        values = one.order(self._source.raw(one.origin).view(unit).reshape(*stored.shape[:-1], -1))
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        info = self.tensors[name]
        return dequantize(self.raw(name), info.type, info.shape)


class FilledWeights(WeightProxy):
    """A WeightSource with vectors of one value beside its own: the weights of norms that have none, or zeros."""

    def __init__(self, source: WeightSource, lengths: Mapping[str, int], value: float = 1.0) -> None:
        self._value = value
        super().__init__(source, {name: TensorInfo(name, TensorType.F32, (n,)) for name, n in lengths.items()})

    def release_pages(self, names: Iterable[str]) -> None:
        self._source.release_pages({*names} - self._changed.keys())

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self._changed_array(name).view(np.uint8)

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        return np.full(self.tensors[name].shape, self._value, np.float32)


def _is_float8(source: WeightSource, name: str) -> bool:
    return not name.startswith("per_layer_") and float8_of(source, name) is not None


def _is_requantized(info: TensorInfo) -> bool:
    is_matrix = len(info.shape) == 2 and info.name.startswith("blk.") and info.name.endswith(".weight")
    return is_matrix and info.type in FLOATS and info.shape[1] % TensorType.Q8_0.block_values == 0
