"""Tiny models with parts that do nothing, or little, and their logits by the reference backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.config import EngineConfig
from kvarn.evaluation.model import EvaluatedModel
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.float_model import write_float_model

Float32 = npt.NDArray[np.float32]
Change = Callable[[str, Float32], Float32]

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 192, 2, 1, 32  # as write_float_model makes them of width and hidden


def write_changed(path: Path, change: Change, *, type: TensorType = TensorType.F32) -> Path:
    """A float model whose tensors went through `change`, which may alter the array it gets."""
    plain = write_float_model(path.with_suffix(".plain"), width=WIDTH, hidden=HIDDEN, type=type)
    file = GGUFFile(plain)
    tensors = {
        name: Stored.quantized(change(name, file.array(name).copy()), info.type) for name, info in file.tensors.items()
    }
    write_gguf(path, file.stored_metadata(), tensors)
    file.close()
    return path


def weak_channels(seed: int = 0) -> Change:
    """In every layer two thirds of the channels, drawn at random, add a hundredth of what the others do."""

    def change(name: str, values: Float32) -> Float32:
        if name.endswith("ffn_down.weight"):
            rng = np.random.default_rng((seed, int(name.split(".")[1])))
            values[:, rng.permutation(HIDDEN)[: 2 * HIDDEN // 3]] *= 0.01
        return values

    return change


def logits_of(path: Path, num_tokens: int = 24) -> Float32:
    """Every logit of some tokens, in float32."""
    with EvaluatedModel(path, EngineConfig(context=64, backend="reference", kv_dtype="f32")) as model:
        ids = np.random.default_rng(0).integers(3, 40, num_tokens).astype(np.int32)
        return np.concatenate(list(model.logits(model.states(ids, 0))))
