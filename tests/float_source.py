"""Float sources for measurements, made of the quantised models that there are, the same bytes on every machine.

A dequantised model lies on the grid of its type, which favours that type. Here every value is moved by up to half a
step of its block, by a fixed generator, so that no type fits it by descent; sha256 says that it is the one measured.
smollm2-768 is SmolLM2 so moved and then widened, for types that rows of 576 do not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Streamed, write_gguf
from kvarn.formats.weights import TensorType
from tests.assets import cached, gemma3, qwen_coder, smollm2, verify
from tests.widened_source import widen

SLICE_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class FloatSource:
    """A model as F16. made: of which model, and how; sha256 of the file."""

    name: str
    origin: Callable[[], Path]
    made: Callable[[Path, Path], Path]
    sha256: str


SMOLLM2_SHA256 = "3fd849f649389f89094b8015dc701f409b87e08057fdbaa8f7dd2b0cff5c8f27"
GEMMA3_SHA256 = "c7b4a333d39480419c8f13966157eb670009eef3947ab5b34c3ccd6a45f12be5"
QWEN_CODER_SHA256 = "d5a5b3a71ec361db8d8d8205e0c176c8b44d4c696df6d8a294c9bb6344a3bca1"
SMOLLM2_768_SHA256 = "79ceebc4cf14bb2113465d00e138d791170ec6e4329921f8179646ffd5176323"


@cache
def float_source(name: str) -> Path:
    """One of SOURCES from the cache, made on the first call: 0.3 to 1.3 GB."""
    source = SOURCES[name]

    def fill(target: Path, _downloads: Path) -> None:
        source.made(source.origin(), target)
        verify(target, source.sha256)

    return cached(source.name, fill)


def off_its_grid(source: Path, path: Path) -> Path:
    """A quantised model as F16, every value moved by up to half a step of its block."""
    opened, rng = GGUFFile(source), np.random.default_rng(0)

    def moved(name: str) -> Streamed:
        info = opened.tensors[name]
        if len(info.shape) < 2:
            return Streamed(info.type, info.shape, lambda: [opened.raw(name)])
        return Streamed(TensorType.F16, info.shape, lambda: [_moved(opened.array(name), info.type, rng)])

    write_gguf(
        path, {**opened.stored_metadata(), "general.file_type": 1}, {name: moved(name) for name in opened.tensors}
    )
    return path


def _moved(values: npt.NDArray[np.float32], type: TensorType, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    out = np.empty(values.shape, "<f2")
    rows = max(1, SLICE_VALUES // values.shape[1])
    for begin in range(0, len(values), rows):
        some = values[begin : begin + rows]
        out[begin : begin + rows] = some if type.block_values == 1 else _moved_rows(some, type, rng)
    return out.reshape(-1).view(np.uint8)


def _moved_rows(values: npt.NDArray[np.float32], type: TensorType, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    blocks = values.reshape(-1, 16 if type is TensorType.Q6_K else 32)
    gaps = np.diff(np.sort(blocks, axis=1), axis=1)
    gaps[gaps <= 1e-3 * np.abs(blocks).max(axis=1, keepdims=True)] = np.inf
    step = gaps.min(axis=1, keepdims=True)
    step[~np.isfinite(step)] = 0
    noise = rng.random(blocks.shape, np.float32) - np.float32(0.5)
    return (blocks + step * noise).reshape(values.shape)


SOURCES: Final = {
    "smollm2": FloatSource("smollm2-f16.gguf", smollm2, off_its_grid, SMOLLM2_SHA256),
    "gemma3": FloatSource("gemma3-270m-f16.gguf", gemma3, off_its_grid, GEMMA3_SHA256),
    "qwen-coder": FloatSource("qwen2.5-coder-0.5b-f16.gguf", qwen_coder, off_its_grid, QWEN_CODER_SHA256),
    "smollm2-768": FloatSource("smollm2-768-f16.gguf", partial(float_source, "smollm2"), widen, SMOLLM2_768_SHA256),
}
