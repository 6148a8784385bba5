"""NVFP4 tensors of GGUF files with scales of their own: X.weight is multiplied by X.scale, one for each expert.

X.input_scale is for kernels that quantise their inputs as well: it changes no value, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.weight_proxy import WeightProxy
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource

# Scales that are tensors of the model, whatever the type of what they belong to.
KEPT: Final[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
    ("gemma4", "diffusion-gemma"), (".ffn_gate_inp", ".ffn_down_exps")
)
BLOCK_BYTES = TensorType.Q8_0.block_bytes


def with_scales(source: WeightSource) -> WeightSource:
    """The source itself where no tensor has a scale."""
    return ScaledWeights(source) if _scales(source) else source


def _scales(source: WeightSource) -> dict[str, str]:
    """The scale of each tensor that has one, by its name."""
    kept = KEPT.get(str(source.metadata.get("general.architecture")), ())
    stems = [name.removesuffix(".scale") for name in source.tensors if name.endswith(".scale")]
    found = {f"{stem}.weight": f"{stem}.scale" for stem in stems if not stem.endswith(kept)}
    return {name: scale for name, scale in found.items() if name in source.tensors}


class ScaledWeights(WeightProxy):
    """Weights with their scales multiplied in; the scales are no tensors any more."""

    def __init__(self, source: WeightSource) -> None:
        self._scales = _scales(source)
        super().__init__(source, {name: source.tensors[name] for name in self._scales})
        inputs = {f"{name.removesuffix('.weight')}.input_scale" for name in self._scales}
        hidden = {*self._scales.values(), *inputs}
        self.tensors = {name: info for name, info in self.tensors.items() if name not in hidden}
        for name, scale in self._scales.items():
            _check(source.tensors[name], source.tensors[scale], source.path)

    def _factors(self, name: str) -> npt.NDArray[np.float32]:
        factors = self._source.array(self._scales[name]).reshape(-1)
        if not np.isfinite(factors).all():
            raise FormatError(f"tensor {self._scales[name]} has NaN or infinite values", file=self.path)
        return factors

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        factors = self._factors(name)
        blocks = self._source.raw(name).reshape(len(factors), -1, BLOCK_BYTES).copy()
        scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32) * factors[:, None, None]
        if np.abs(scales).max() > np.finfo(np.float16).max:
            raise FormatError(f"tensor {name} times its scale is too large for float16", file=self.path)
        blocks[..., :2] = scales.astype("<f2").view(np.uint8)
        return blocks.reshape(-1)

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        values, factors = self._source.array(name), self._factors(name)
        return (values.reshape(len(factors), -1) * factors[:, None]).reshape(values.shape)


def _check(info: TensorInfo, scale: TensorInfo, path: str) -> None:
    """One scale for a matrix, one for each of a stack; of a type that has them."""
    if info.type is not TensorType.Q8_0 or scale.num_values not in (1, info.shape[0] if len(info.shape) > 2 else 1):
        raise FormatError(
            f"tensor {scale.name} has shape {scale.shape}, {info.name} is {info.type.name} {info.shape}; "
            "one scale for each matrix of an NVFP4 tensor is expected",
            file=path,
        )
