"""Dequantising equals the gguf package bit for bit; quantising stays within measured bounds, zero and sign kept."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.weights import TensorType

QUANTISED = [type_ for type_ in TensorType if type_.block_values > 1]

# Largest error and root mean square error of normally distributed values, over the largest magnitude of their block
# (256 values). Measured with the same seed, plus a tenth.
BOUNDS = {
    TensorType.Q4_0: (0.10, 0.032),
    TensorType.Q4_1: (0.071, 0.029),
    TensorType.Q5_0: (0.049, 0.016),
    TensorType.Q5_1: (0.034, 0.014),
    TensorType.Q8_0: (0.0043, 0.0020),
    TensorType.IQ4_NL: (0.10, 0.030),
    TensorType.Q2_K: (0.34, 0.12),
    TensorType.Q3_K: (0.25, 0.057),
    TensorType.Q4_K: (0.071, 0.029),
    TensorType.Q5_K: (0.034, 0.014),
    TensorType.Q6_K: (0.029, 0.0070),
}


def oracle(raw: npt.NDArray[np.uint8], type_: TensorType, rows: int) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[type_.name])


@pytest.mark.parametrize("type_", TensorType)
def test_random_bytes_dequantise_exactly_as_in_the_gguf_package(type_: TensorType) -> None:
    rng = np.random.default_rng(type_.id)
    for rows, columns in [(1, 256), (7, 512), (300, 1024)]:  # the last spans several chunks
        raw = rng.integers(0, 256, type_.num_bytes(rows * columns), dtype=np.uint8)
        values = dequantize(raw, type_, (rows, columns))
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, oracle(raw, type_, rows))


@pytest.mark.parametrize("type_", QUANTISED)
@pytest.mark.parametrize("scale", [0x7C00, 0xFC00, 0x7E01, 0x7BFF, 0x0001, 0x8000, 0x0000])
def test_any_scale_dequantises_exactly_as_in_the_gguf_package(type_: TensorType, scale: int) -> None:
    """Infinity, NaN, the largest and smallest float16 and both zeros, at every place a scale can be."""
    rng = np.random.default_rng(scale)
    raw = rng.integers(0, 256, (16, type_.block_bytes), dtype=np.uint8)
    for at in (0, 2, type_.block_bytes - 4, type_.block_bytes - 2):
        blocks = raw.copy()
        blocks[:, at : at + 2] = (scale & 255, scale >> 8)
        values = dequantize(blocks.reshape(-1), type_, (16, type_.block_values))
        np.testing.assert_array_equal(values, oracle(blocks, type_, 16))


@pytest.mark.parametrize("type_", BOUNDS)
def test_quantised_values_stay_near(type_: TensorType) -> None:
    values = np.random.default_rng(7).standard_normal((64, 256)).astype(np.float32)
    values *= np.logspace(-3, 3, 64, dtype=np.float32)[:, None]
    stored = quantize(values, type_)
    assert stored.dtype == np.uint8
    error = (oracle(stored, type_, 64) - values) / np.abs(values).max(axis=1, keepdims=True)
    largest, rms = BOUNDS[type_]
    assert np.abs(error).max() <= largest
    assert np.sqrt((error**2).mean()) <= rms


@pytest.mark.parametrize("type_", QUANTISED)
def test_a_second_round_trip_changes_little(type_: TensorType) -> None:
    values = np.random.default_rng(8).standard_normal((8, 256)).astype(np.float32)
    once = dequantize(quantize(values, type_), type_, values.shape)
    twice = dequantize(quantize(once, type_), type_, values.shape)
    assert np.abs(twice - once).max() <= np.abs(once - values).max()


@pytest.mark.parametrize("type_", TensorType)
def test_zeros_stay_zeros(type_: TensorType) -> None:
    values = np.zeros((2, 256), dtype=np.float32)
    np.testing.assert_array_equal(dequantize(quantize(values, type_), type_, (2, 256)), values)


@pytest.mark.parametrize("type_", QUANTISED)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1e30, 3e38])
def test_extreme_magnitudes_give_finite_values(type_: TensorType, magnitude: float) -> None:
    values = np.random.default_rng(9).uniform(-1, 1, (4, 256)).astype(np.float32) * np.float32(magnitude)
    decoded = dequantize(quantize(values, type_), type_, values.shape)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("type_", QUANTISED)
@pytest.mark.parametrize("sign", [1, -1])
def test_blocks_of_one_sign_keep_it(type_: TensorType, sign: int) -> None:
    values = sign * np.random.default_rng(10).uniform(0.5, 1, (4, 256)).astype(np.float32)
    decoded = dequantize(quantize(values, type_), type_, values.shape)
    assert (np.sign(decoded) == sign).all()


def test_bf16_rounds_as_the_gguf_package_does() -> None:
    bits = np.random.default_rng(11).integers(0, 2**32, 4096, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), np.float32([np.inf, -np.inf, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])])
    expected = gguf.quants.quantize(values.reshape(1, -1), gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(quantize(values, TensorType.BF16), expected.reshape(-1))


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(FormatError, match=r"33 bytes do not hold a Q8_0 tensor of shape \(32,\)"):
        dequantize(np.zeros(33, dtype=np.uint8), TensorType.Q8_0, (32,))
    with pytest.raises(FormatError, match="do not hold"):
        dequantize(np.zeros(34, dtype=np.uint8), TensorType.Q8_0, (33,))


def test_values_that_cannot_be_quantised_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="rows of 100 values cannot be Q4_K"):
        quantize(np.zeros((2, 100), dtype=np.float32), TensorType.Q4_K)
    with pytest.raises(FormatError, match="NaN or infinite"):
        quantize(np.full(32, np.nan, dtype=np.float32), TensorType.Q8_0)


def test_results_are_fresh_arrays() -> None:
    raw = np.zeros(8, dtype=np.uint8)
    raw.flags.writeable = False
    values = dequantize(raw, TensorType.F32, (2,))
    values[0] = 1
    assert raw[0] == 0
