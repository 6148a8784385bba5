"""Matrices as floats of one type, whatever they are stored as: for devices without kernels for quantised ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvarn.formats.quants import quantize
from kvarn.formats.weight_proxy import WeightProxy
from kvarn.formats.weights import TensorType, WeightSource


class DenseWeights(WeightProxy):
    """A WeightSource whose matrices appear as type, one of the float types; norms and biases stay as they are."""

    def __init__(self, source: WeightSource, type: TensorType) -> None:
        self._type = type
        matrices = {name: info for name, info in source.tensors.items() if len(info.shape) > 1 and info.type != type}
        super().__init__(source, {name: replace(info, type=type) for name, info in matrices.items()})

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        return quantize(self._source.array(name), self._type)

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        return self._source.array(name)
