"""The native encoders: the bytes of known oracles, and searches that find what a NumPy search finds."""

from __future__ import annotations

import hashlib

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.native import _native
from kvarn.errors import FormatError
from kvarn.formats.k_quants import scales_and_mins
from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.quantization.blocks import requantized
from tests.unit.quantization.numpy_search import F, affine, sequential_sum, symmetric

T = TensorType
PLAIN = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0)
SEARCHED = (T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL)
WEIGHTED = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, *SEARCHED)
Float32 = npt.NDArray[np.float32]
# sha256 of what ggml_quantize_chunk of llama-cpp-python 0.3.36, built with GGML_NATIVE=OFF, makes of weights(rows=64).
GGML_DIGESTS = {
    T.Q2_K: "39cdd70da8ad53c3d0fd38425e4ba5d4adcc4f4f83e6d218ed530e63634272a3",
    T.Q4_K: "5c7e8c1fa73a70783246d070d7d6a05c88f48a91c8be4bc3e4912983c6128807",
    T.Q5_K: "590fd7878fc359b12df90b86adb2d72e9773d39a3736c97629c19825fe657abf",
    T.Q6_K: "4d875811be36db455f0ca730972bbe0969d5f62e511f6672f05ed5f344eb0702",
}


def encode(x: Float32, type: TensorType, importance: Float32 | None = None, *, threads: int = 2) -> bytes:
    info = TensorInfo("a.weight", T.F32, x.shape)
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return b"".join(map(bytes, requantized(raw, info, type, importance, _native.ThreadTeam(threads))))


def decode(data: bytes, type: TensorType, shape: tuple[int, ...]) -> Float32:
    return dequantize(np.frombuffer(data, np.uint8), type, shape)


def weights(rows: int = 6, columns: int = 1024) -> Float32:
    """Rows as models have them: mostly small values, some outliers, a block of zeros, ties and a constant block."""
    rng = np.random.default_rng(5)
    size = (max(rows, 6), columns)
    x = (0.02 * rng.standard_normal(size) * rng.exponential(1, size)).astype(np.float32)
    x[0, :256] = 0
    x[1, :256] = 0.5
    x[2, :256] = -0.25
    x[3, :32] = np.tile([1, -1], 16)
    x[4, 64:96] = 1e-30
    x[5, :256] *= np.float32(1e-6)
    return x[:rows]


def test_zeros_of_either_sign_are_those_of_llama_cpp() -> None:
    """A scale of zero has the sign that ggml's arithmetic leads to, a minimum that of the first zero."""
    x = np.full((1, 32), -0.0, np.float32)
    x[0, 1::2] = 0.0
    begins = {T.Q4_0: "0080", T.Q5_0: "0080", T.Q8_0: "0000", T.Q4_1: "00000080", T.Q5_1: "00000080"}
    assert {type: encode(x, type)[: len(begin) // 2].hex() for type, begin in begins.items()} == begins


@pytest.mark.parametrize("type", PLAIN, ids=lambda type: type.name)
def test_plain_types_have_the_bytes_of_the_gguf_package(type: TensorType) -> None:
    x = weights()
    expected = gguf.quants.quantize(x, getattr(gguf.GGMLQuantizationType, type.name))
    assert encode(x, type) == expected.tobytes()


@pytest.mark.parametrize("type", GGML_DIGESTS, ids=lambda type: type.name)
def test_k_quants_have_the_bytes_of_llama_cpp(type: TensorType) -> None:
    assert hashlib.sha256(encode(weights(rows=64), type)).hexdigest() == GGML_DIGESTS[type]


@pytest.mark.parametrize("type", [T.F16, T.BF16, T.F32], ids=lambda type: type.name)
def test_float_types_round_to_nearest(type: TensorType) -> None:
    x = np.concatenate([weights(), np.array([[65519, 65520, 1e-8, -1e-8] * 256], np.float32)])
    assert encode(x, type) == quantize(x, type).tobytes()


@pytest.mark.parametrize("source", [T.F16, T.BF16], ids=lambda type: type.name)
def test_a_half_precision_source_gives_what_its_values_give(source: TensorType) -> None:
    raw = quantize(weights(), source)
    info = TensorInfo("a.weight", source, (6, 1024))
    stored = b"".join(map(bytes, requantized(raw, info, T.Q4_K, None, _native.ThreadTeam(1))))
    assert stored == encode(dequantize(raw, source, (6, 1024)), T.Q4_K)


@pytest.mark.parametrize(("type", "steps"), [(T.Q4_K, (15, -1, 0.1, 20)), (T.Q5_K, (31, -0.5, 0.1, 15))])
def test_k_quants_with_minimum_choose_the_scales_of_the_numpy_search(
    type: TensorType, steps: tuple[int, float, float, int]
) -> None:
    x = weights()
    parts = x.reshape(-1, 32)
    mean = np.sqrt(sequential_sum(parts * parts) / F(32))
    scale, minimum = (found.reshape(-1, 8) for found in affine(parts, mean[:, None] + np.abs(parts), steps))
    stored = np.frombuffer(encode(x, type), np.uint8).reshape(-1, type.block_bytes)
    got_scale, got_minimum = scales_and_mins(stored)
    for found, wanted in ((got_scale, scale), (got_minimum, minimum)):
        unit = (wanted.max(1, keepdims=True) / F(63)).astype(np.float16).astype(np.float32)
        largest = wanted.max(1, keepdims=True)
        steps_of = np.rint(np.where(largest > 0, F(63) / np.where(largest > 0, largest, 1), 0) * wanted)
        np.testing.assert_array_equal(found, unit * steps_of)


def test_q6_k_chooses_the_scales_of_the_numpy_search() -> None:
    x = weights()[3:]
    scale = symmetric(x.reshape(-1, 16), 32).reshape(-1, 16)
    stored = np.frombuffer(encode(x, T.Q6_K), np.uint8).reshape(-1, T.Q6_K.block_bytes)
    peak = np.take_along_axis(scale, np.abs(scale).argmax(1, keepdims=True), 1)
    by_scale = F(-128) / peak
    np.testing.assert_array_equal(stored[:, 192:208].view(np.int8), np.minimum(np.rint(by_scale * scale), 127))
    np.testing.assert_array_equal(stored[:, 208:].view("<f2")[:, :1], (F(1) / by_scale).astype("<f2"))


@pytest.mark.parametrize("type", SEARCHED, ids=lambda type: type.name)
def test_a_search_is_closer_than_plain_rounding(type: TensorType) -> None:
    x = weights()
    searched = np.square(decode(encode(x, type), type, x.shape) - x).sum()
    plain = np.square(dequantize(quantize(x, type), type, x.shape) - x).sum()
    assert searched < plain


@pytest.mark.parametrize("type", WEIGHTED, ids=lambda type: type.name)
def test_importance_moves_the_error_to_columns_that_matter_less(type: TensorType) -> None:
    x = weights(columns=512)
    importance = np.random.default_rng(1).exponential(1, 512).astype(np.float32) ** 2
    evenly, weighted = (decode(encode(x, type, given), type, x.shape) - x for given in (None, importance))
    assert (importance * weighted**2).sum() < (importance * evenly**2).sum()


@pytest.mark.parametrize("type", WEIGHTED, ids=lambda type: type.name)
def test_importance_of_one_column_alone_leaves_finite_values(type: TensorType) -> None:
    x = weights(columns=256)
    importance = np.zeros(256, np.float32)
    importance[3] = 1
    back = decode(encode(x, type, importance), type, x.shape)
    assert np.isfinite(back).all()
    assert np.abs(back - x).max() <= 2 * np.abs(x).max()


def test_every_expert_of_a_stack_has_its_own_importance() -> None:
    x = weights(columns=256).reshape(2, 3, 256)
    importance = np.random.default_rng(2).exponential(1, (2, 256)).astype(np.float32)
    both = encode(x, T.Q4_K, importance)
    assert both == encode(x[0], T.Q4_K, importance[0]) + encode(x[1], T.Q4_K, importance[1])


@pytest.mark.parametrize("type", WEIGHTED, ids=lambda type: type.name)
def test_threads_do_not_change_a_byte(type: TensorType) -> None:
    x = weights(rows=64)[:, :512]
    importance = np.random.default_rng(3).exponential(1, 512).astype(np.float32)
    assert encode(x, type, importance, threads=1) == encode(x, type, importance, threads=4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_the_tensors_name(bad: float) -> None:
    x = weights(rows=1)
    x[0, 700] = bad
    with pytest.raises(FormatError, match=r"a\.weight has NaN or infinite"):
        encode(x, T.Q4_0)


@pytest.mark.parametrize(("type", "middle"), [(T.Q4_0, 8), (T.Q5_0, 16)], ids=["Q4_0", "Q5_0"])
def test_a_scale_is_the_best_of_all_grids_as_it_is_stored(type: TensorType, middle: int) -> None:
    """Where one column outweighs all others, how a scale is rounded decides between grids that are nearly as good."""
    x, importance = weights(rows=72)[8:], np.ones(1024, np.float32)
    importance[::32] = 1e4
    squares = np.square(x, dtype=np.float64)
    w = (importance * np.sqrt(squares.mean(axis=1, keepdims=True) + squares)).reshape(-1, 32)
    blocks = x.reshape(-1, 32).astype(np.float64)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], 1)
    least = np.full(len(blocks), np.inf)
    for step in range(-9, 10):
        q = np.clip(np.rint(-(middle + 0.1 * step) / peak * blocks), -middle, middle - 1)
        scale = (w * blocks * q).sum(axis=1) / (w * q * q).sum(axis=1)
        stored = scale.astype(np.float16).astype(np.float64)[:, None]
        least = np.minimum(least, (w * (stored * q - blocks) ** 2).sum(axis=1))
    found = decode(encode(x, type, importance), type, x.shape).reshape(-1, 32)
    assert ((w * (found - blocks) ** 2).sum(axis=1) <= 1.0001 * least).all()
