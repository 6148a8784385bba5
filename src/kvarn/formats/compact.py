"""Weights stored as floats, held as Q8_0: a quarter of the memory, and int8 kernels instead of float ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)


class CompactWeights:
    """A WeightSource whose layers' float matrices appear as Q8_0; embeddings, norms and biases stay as they are."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.tensors: Mapping[str, TensorInfo] = {
            name: replace(info, type=TensorType.Q8_0) if _is_compacted(info) else info
            for name, info in source.tensors.items()
        }

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._source.metadata

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        if not self._changes(name):
            return self._source.raw(name)
        return quantize(self._source.array(name), TensorType.Q8_0)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        if not self._changes(name):
            return self._source.array(name)
        info = self.tensors[name]
        return dequantize(self.raw(name), info.type, info.shape)

    def forget(self, names: Iterable[str]) -> None:
        self._source.forget(names)

    def verify_unchanged(self) -> None:
        self._source.verify_unchanged()

    def close(self) -> None:
        self._source.close()

    def _changes(self, name: str) -> bool:
        return self.tensors[name] is not self._source.tensors[name]


def _is_compacted(info: TensorInfo) -> bool:
    is_matrix = len(info.shape) == 2 and info.name.startswith("blk.") and info.name.endswith(".weight")
    return is_matrix and info.type in FLOATS and info.shape[1] % TensorType.Q8_0.block_values == 0
