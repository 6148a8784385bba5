"""Our encoders beside llama.cpp's own, where llama-cpp-python is installed: `make test-long` installs it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.native import _native
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorType
from kvarn.quantization.blocks import encode as encode_packed
from kvarn.quantization.packed.types import PackedType, WrittenType
from tests.conftest import Size
from tests.unit.quantization.test_blocks import WEIGHTED, encode

T = TensorType
Float32 = npt.NDArray[np.float32]

# llama.cpp's weight of an error: importance * sqrt(sigma2 + x^2), sigma2 = so many times the mean square of
# the super-block, or of the row; Q6_K has the bare importance.
SIGMA_FACTORS = {T.Q2_K: 1.0, T.Q3_K: 2.0, T.Q4_K: 2.0, T.Q5_K: 2.0, T.IQ4_NL: 2.0}


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    package = pytest.importorskip("llama_cpp")
    folder = os.environ.get("LLAMA_CPP_LIB_PATH") or Path(package.__file__).parent / "lib"
    found = sorted(Path(folder).glob("libggml-base.*"))
    if not found:
        pytest.skip("llama-cpp-python has no libggml-base of its own")
    library = ctypes.CDLL(str(found[0]))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    return library


def ggml_encode(ggml: ctypes.CDLL, x: Float32, type: WrittenType, importance: Float32 | None) -> bytes:
    out = np.empty(type.num_bytes(x.size), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    ggml.ggml_quantize_chunk(type.id, x.ctypes.data, out.ctypes.data, 0, *x.shape, weights)
    return out.tobytes()


def tensor(size: Size, tails: float) -> Float32:
    rng = np.random.default_rng(11)
    shape = (size(32, 512), 2048)
    return (0.02 * rng.standard_normal(shape) * rng.exponential(1, shape) ** tails).astype(np.float32)


@pytest.mark.parametrize(
    "type", [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K], ids=lambda type: type.name
)
def test_blocks_without_importance_are_llama_cpps(ggml: ctypes.CDLL, size: Size, type: TensorType) -> None:
    x = tensor(size, 1)
    ours, theirs = (
        np.frombuffer(data, np.uint8).reshape(-1, type.block_bytes)
        for data in (encode(x, type), ggml_encode(ggml, x, type, None))
    )
    # A library built for this machine fuses multiplications and additions, which moves a few of the searches.
    assert (ours == theirs).all(axis=1).mean() > 0.97


@pytest.mark.parametrize("tails", [0, 1], ids=["normal", "heavy tails"])
@pytest.mark.parametrize("type", WEIGHTED, ids=lambda type: type.name)
def test_the_weighted_error_is_no_larger_than_llama_cpps(
    ggml: ctypes.CDLL, size: Size, type: TensorType, tails: float
) -> None:
    x = tensor(size, tails)
    importance = (np.random.default_rng(12).exponential(1, x.shape[1]) ** 2 + 0.01).astype(np.float32)
    block = type.block_values if type in SIGMA_FACTORS else x.shape[1]
    means = np.square(x).reshape(len(x), -1, block).mean(axis=2).repeat(block, axis=1)
    weight = importance * (1 if type is T.Q6_K else np.sqrt(SIGMA_FACTORS.get(type, 1.0) * means + x**2))
    ours, theirs = (
        float((weight * (dequantize(np.frombuffer(data, np.uint8), type, x.shape) - x) ** 2).sum())
        for data in (encode(x, type, importance), ggml_encode(ggml, x, type, importance))
    )
    assert ours <= theirs


def test_mxfp4_without_importance_is_llama_cpps(ggml: ctypes.CDLL, size: Size) -> None:
    x = tensor(size, 1)
    ours = encode_packed(x, PackedType.MXFP4, None, _native.ThreadTeam(1))
    assert ours.tobytes() == ggml_encode(ggml, x, PackedType.MXFP4, None)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("tails", [0, 1], ids=["normal", "heavy tails"])
@pytest.mark.parametrize("type", PackedType)
def test_packed_types_err_no_more_than_llama_cpps(
    ggml: ctypes.CDLL, size: Size, type: PackedType, tails: float, weighed: bool
) -> None:
    x = tensor(size, tails)
    importance = (np.random.default_rng(12).exponential(1, x.shape[1]) ** 2 + 0.01).astype(np.float32)
    weight: Float32 = np.ones_like(x) if type is PackedType.MXFP4 else x**2
    if weighed:
        means = np.square(x).reshape(len(x), -1, 256).mean(axis=2).repeat(256, axis=1)
        weight = importance * (1 if type is PackedType.MXFP4 else np.sqrt(2 * means + x**2))
    data = [
        encode_packed(x, type, importance if weighed else None, _native.ThreadTeam(1)).tobytes(),
        ggml_encode(ggml, x, type, importance if weighed else None),
    ]
    kind = gguf.GGMLQuantizationType[type.name]
    values = [gguf.dequantize(np.frombuffer(raw, np.uint8).reshape(len(x), -1), kind) for raw in data]
    ours, theirs = (float((weight * (value - x) ** 2).sum(dtype=np.float64)) for value in values)
    assert ours <= theirs
