"""Our encoders beside llama.cpp's own, where llama-cpp-python is installed: `make test-long` installs it."""

from __future__ import annotations

import ctypes
import platform

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.native import _native
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorType
from kvarn.quantization.blocks import encode as encode_storage_only
from kvarn.quantization.storage_only.types import StorageOnlyType
from tests.conftest import Size
from tests.ggml_library import error_weight, ggml_encode, open_ggml
from tests.unit.quantization.test_blocks import PLAIN, WEIGHTED, encode

T = TensorType
Float32 = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    library = open_ggml()
    if library is None:
        pytest.skip("llama-cpp-python is not installed, or has no libggml-base of its own")
    return library


def tensor(size: Size, tails: float) -> Float32:
    rng = np.random.default_rng(11)
    shape = (size(32, 512), 2048)
    return (0.02 * rng.standard_normal(shape) * rng.exponential(1, shape) ** tails).astype(np.float32)


@pytest.mark.parametrize("type", [*PLAIN, T.Q2_K, T.Q4_K, T.Q5_K, T.Q6_K], ids=lambda type: type.name)
def test_blocks_without_importance_are_llama_cpps(ggml: ctypes.CDLL, size: Size, type: TensorType) -> None:
    x = tensor(size, 1)
    ours, theirs = (
        data.reshape(-1, type.block_bytes)
        for data in (np.frombuffer(encode(x, type), np.uint8), ggml_encode(ggml, x, type, None))
    )
    # Compilers for ARM fuse multiplications and additions of ggml-base, which moves a few of the searches.
    assert (ours == theirs).all(axis=1).mean() >= (1.0 if platform.machine() in ("x86_64", "AMD64") else 0.97)


@pytest.mark.parametrize("type", PLAIN, ids=lambda type: type.name)
def test_zeros_of_either_sign_are_llama_cpps(ggml: ctypes.CDLL, type: TensorType) -> None:
    x = np.abs(np.random.default_rng(3).standard_normal((3, 512))).astype(np.float32)
    x[:, ::5], x[1:, ::7] = -0.0, 0.0
    x[0, :32], x[0, 32:64] = -0.0, np.tile(np.float32([0.0, -0.0]), 16)
    assert np.array_equal(np.frombuffer(encode(x, type), np.uint8), ggml_encode(ggml, x, type, None))


@pytest.mark.parametrize("tails", [0, 1], ids=["normal", "heavy tails"])
@pytest.mark.parametrize("type", WEIGHTED, ids=lambda type: type.name)
def test_the_weighted_error_is_no_larger_than_llama_cpps(
    ggml: ctypes.CDLL, size: Size, type: TensorType, tails: float
) -> None:
    x = tensor(size, tails)
    importance = (np.random.default_rng(12).exponential(1, x.shape[1]) ** 2 + 0.01).astype(np.float32)
    weight = error_weight(x, type, importance)
    ours, theirs = (
        float((weight * (dequantize(data, type, x.shape) - x) ** 2).sum())
        for data in (np.frombuffer(encode(x, type, importance), np.uint8), ggml_encode(ggml, x, type, importance))
    )
    assert ours <= theirs


@pytest.mark.parametrize("type", [T.Q4_1, T.Q5_1], ids=lambda type: type.name)
def test_a_column_that_outweighs_all_others_is_stored_well(ggml: ctypes.CDLL, size: Size, type: TensorType) -> None:
    """Rounding scale and minimum to halves is then most of the error."""
    x = tensor(size, 1)
    importance = (np.random.default_rng(12).exponential(1, x.shape[1]) ** 2 + 0.01).astype(np.float32)
    importance[100] = 1e6
    weight = error_weight(x, type, importance)
    ours, theirs = (
        float((weight * (dequantize(data, type, x.shape) - x) ** 2).sum(dtype=np.float64))
        for data in (np.frombuffer(encode(x, type, importance), np.uint8), ggml_encode(ggml, x, type, importance))
    )
    assert ours <= theirs


def test_mxfp4_without_importance_is_llama_cpps(ggml: ctypes.CDLL, size: Size) -> None:
    x = tensor(size, 1)
    ours = encode_storage_only(x, StorageOnlyType.MXFP4, None, _native.ThreadTeam(1))
    assert np.array_equal(ours, ggml_encode(ggml, x, StorageOnlyType.MXFP4, None))


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("tails", [0, 1], ids=["normal", "heavy tails"])
@pytest.mark.parametrize("type", StorageOnlyType)
def test_storage_only_types_err_no_more_than_llama_cpps(
    ggml: ctypes.CDLL, size: Size, type: StorageOnlyType, tails: float, weighed: bool
) -> None:
    x = tensor(size, tails)
    importance = (np.random.default_rng(12).exponential(1, x.shape[1]) ** 2 + 0.01).astype(np.float32)
    weight: Float32 = np.ones_like(x) if type is StorageOnlyType.MXFP4 else x**2
    if weighed:
        weight = error_weight(x, type, importance)
    data = [
        encode_storage_only(x, type, importance if weighed else None, _native.ThreadTeam(1)),
        ggml_encode(ggml, x, type, importance if weighed else None),
    ]
    kind = gguf.GGMLQuantizationType[type.name]
    values = [gguf.dequantize(raw.reshape(len(x), -1), kind) for raw in data]
    ours, theirs = (float((weight * (value - x) ** 2).sum(dtype=np.float64)) for value in values)
    assert ours <= theirs
