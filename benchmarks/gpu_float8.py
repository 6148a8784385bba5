"""A model in FP8 on a GPU, packed and as bfloat16 of the same values: the same bits in company and chunks, and speed.

    python -m benchmarks.gpu_float8 [--shape llama-8b] [--out FILE.json]

Random codes of E4M3 with a scale for each row. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu_check import SHAPES, RandomWeights, bench, layout, same
from kvarn.backends.torch.backend import TorchBackend
from kvarn.backends.torch.device import Device, choose_device
from kvarn.formats.recast_weights import DenseWeights
from kvarn.formats.weights import Float8Matrix, TensorType
from kvarn.models.describe import describe
from kvarn.models.spec import ModelSpec


class Float8Weights(RandomWeights):
    """RandomWeights whose layers' matrices are in FP8."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, tied=False)
        codes = torch.randn(7_340_033, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
        self._codes = codes.view(torch.uint8).numpy()
        matrices = {name for name, info in self.tensors.items() if name.startswith("blk.") and len(info.shape) == 2}
        self.tensors = {
            name: replace(info, type=TensorType.F16) if name in matrices else info
            for name, info in self.tensors.items()
        }

    def float8(self, name: str) -> Float8Matrix | None:
        info = self.tensors[name]
        if info.type is not TensorType.F16:
            return None
        rows = info.shape[0]
        scales = (0.02 * (1 + np.arange(rows) % 7 / 7)).astype(np.float32).reshape(rows, 1)
        return Float8Matrix(lambda: (np.resize(self._codes, info.shape), scales))

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        matrix = self.float8(name)
        if matrix is None:
            return super().raw(name)
        codes, scales = map(torch.from_numpy, matrix.read())
        return (codes.view(torch.float8_e4m3fn).half() * scales.half()).view(torch.uint8).reshape(-1).numpy()


def load(device: Device, source: Float8Weights, *, is_packed: bool) -> tuple[TorchBackend, ModelSpec]:
    description = describe(source)
    kept, float8_bytes = (device.packed_types, device.float8_bytes) if is_packed else (None, None)
    weights = DenseWeights(description.weights, TensorType.BF16, kept, float8_bytes)
    backend = TorchBackend(device, 8)
    backend.load(description.spec, weights)
    shape = layout(description.spec)
    backend.reserve_kv(shape, 8200 * shape.block_bytes)
    return backend, description.spec


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", action="append")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = choose_device("cuda")
    results: dict[str, Any] = {"device": device.title, "torch": torch.__version__}
    for shape in given.shape or ["llama-8b"]:
        for is_packed in (True, False):
            name, began = f"{shape} {'fp8' if is_packed else 'bf16'}", time.perf_counter()
            backend, spec = load(device, Float8Weights(SHAPES[shape]), is_packed=is_packed)
            results[f"load_s/{name}"] = round(time.perf_counter() - began, 1)
            if is_packed:
                same(results, name, backend, spec)
            bench(results, name, backend, spec)
            results[f"gpu_gb/{name}"] = round(torch.cuda.memory_allocated() / 1e9, 2)
            backend.close()
            torch.cuda.empty_cache()
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
