"""Tensors of a file onto the device: quantised types packed for its kernels or dequantised, floats in its type."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.torch.cuda.quantized.pack import (
    PACKINGS,
    PackedMatrix,
    QuantizedMatrix,
    pack,
    pack_float8,
    stack,
)
from kvarn.backends.torch.dequantize import dequantize
from kvarn.backends.torch.device import Device
from kvarn.backends.torch.loading.staging import Staging
from kvarn.backends.torch.weights import ExpertStack, Linear, NormWeights
from kvarn.formats.recast_weights import DenseWeights
from kvarn.formats.weights import TensorType, WeightSource, float8_of
from kvarn.models.spec import Norm

FLOATS = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}


class WeightReader:
    """Reads tensors by name onto a device, telling its progress; packs: quantised matrices may stay so."""

    def __init__(
        self, source: WeightSource, device: Device, progress: Callable[[int, int], None] | None, *, packs: bool = False
    ) -> None:
        self._source = source.stored if isinstance(source, DenseWeights) else source  # made dense on the device
        self._device = device
        self._packed = _packed_types(source) if packs else ()
        self._float8 = source.float8_names if packs and isinstance(source, DenseWeights) else frozenset()
        self._progress = progress
        self._total = sum(info.num_bytes for info in self._source.tensors.values())
        self._done = 0
        self.has_packed = False
        self._staging = Staging(device.torch_device) if device.kind == "cuda" else None

    def close(self) -> None:
        """Wait until everything that was read is on the device."""
        if self._staging is not None:
            self._staging.close()

    def matrix(self, *names: str) -> Tensor | QuantizedMatrix:
        """One or several matrices under each other: packed, or in the device's type."""
        parts = stack([self._pack(name) for name in names])
        if len(parts) == 1 and isinstance(parts[0], Tensor):
            return parts[0]
        return QuantizedMatrix(tuple(parts), self._device.dtype)

    def experts(self, *stems: str, bias: bool) -> ExpertStack:
        """Matrices of all experts under each other, in the device's type."""
        parts = [self._read(f"{stem}.weight", self._device.dtype) for stem in stems]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        return ExpertStack(weight, self.vector(*(f"{stem}.bias" for stem in stems)) if bias else None)

    def vector(self, *names: str) -> Tensor:
        parts = [self._read(name, torch.float32) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def linear(self, *stems: str, bias: bool = False) -> Linear:
        weight = self.matrix(*(f"{stem}.weight" for stem in stems))
        return Linear(weight, self.vector(*(f"{stem}.bias" for stem in stems)) if bias else None)

    def dense(self, name: str) -> Tensor:
        """One matrix, or several on top of each other, in the device's type in any case."""
        return self._read(name, self._device.dtype)

    def narrow(self, stem: str, *, bias: bool = False) -> Linear:
        """A matrix of few rows, which is not packed."""
        weight = self.dense(f"{stem}.weight")
        return Linear(weight, self.vector(f"{stem}.bias") if bias else None)

    def norm(self, stem: str, norm: Norm | None) -> NormWeights | None:
        if norm is None:
            return None
        bias = self.vector(f"{stem}.bias") if norm.has_bias else None
        return NormWeights(norm, self.vector(f"{stem}.weight"), bias)

    def _pack(self, name: str) -> PackedMatrix | Tensor:
        info = self._source.tensors[name]
        if name in self._float8 and (float8 := self._pack_float8(name)) is not None:
            return float8
        if info.type not in self._packed or not info.num_bytes:
            return self._read(name, self._device.dtype)
        columns, depth = info.shape
        packed = pack(self._raw(name), info.type, (columns, depth))
        self.has_packed = True
        self._finish(name)
        return packed

    def _pack_float8(self, name: str) -> PackedMatrix | None:
        stored = float8_of(self._source, name)
        assert stored is not None, "counted as kept"
        codes, scales = stored.read()
        packed = pack_float8(self._copy(codes), torch.from_numpy(scales.copy()))
        if packed is not None:
            self.has_packed = True
            self._finish(name)
        return packed

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        info = self._source.tensors[name]
        if not info.num_bytes:
            return torch.empty(info.shape, dtype=dtype, device=self._device.torch_device)
        raw = self._raw(name)
        if info.type in FLOATS:
            values = raw.view(FLOATS[info.type]).view(info.shape).to(dtype)
        else:
            values = dequantize(raw, info.type, info.shape, dtype)
        self._finish(name)
        return values

    def _raw(self, name: str) -> Tensor:
        return self._copy(self._source.raw(name))

    def _copy(self, raw: npt.NDArray[np.uint8]) -> Tensor:
        if self._staging is not None:
            return self._staging.copy(raw)
        return torch.from_numpy(np.array(raw)).to(self._device.torch_device)

    def _finish(self, name: str) -> None:
        """A tensor is on the device."""
        info = self._source.tensors[name]
        self._source.release_pages((name,))
        self._done += info.num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _packed_types(source: WeightSource) -> Collection[TensorType]:
    """The types that stay packed: those that the plan counted so."""
    return source.kept if isinstance(source, DenseWeights) else PACKINGS
