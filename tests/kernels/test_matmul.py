"""Every matrix kernel of every table: right within its tolerance, exact at the extremes, blind to how work is cut."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.backends.native._native import kernels
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorType
from tests.kernels.support import (
    F32_TOLERANCE,
    QUANTIZED,
    TABLES,
    TYPES,
    Bytes,
    Floats,
    random_activations,
    random_matrix,
    seen_by_kernel,
    set_halves,
    weights_of_kernel,
)

each_table = pytest.mark.parametrize("table", TABLES)
each_type = pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
each_quantized = pytest.mark.parametrize("type_", QUANTIZED, ids=lambda t: t.name)


def columns_of(type_: TensorType) -> list[int]:
    return {1: [1, 37, 576], 32: [32, 64, 576, 4864], 256: [256, 512, 4864]}[type_.block_values]


def multiply(table: str, type_: TensorType, raw: Bytes, rows: int, x: Floats, **cut: int) -> Floats:
    packed = kernels.pack(type_.id, raw, rows, x.shape[1])
    return kernels.matmul(table, type_.id, packed, rows, x, **cut)


@each_table
@each_type
@pytest.mark.parametrize("rows", [1, 13, 40])
def test_products_agree_with_double_arithmetic(table: str, type_: TensorType, rows: int) -> None:
    for columns in columns_of(type_):
        raw, x = random_matrix(type_, rows, columns), random_activations(5, columns)
        weights = weights_of_kernel(table, type_, dequantize(raw, type_, (rows, columns)))
        seen = seen_by_kernel(table, type_, x)
        error = np.abs(multiply(table, type_, raw, rows, x) - seen @ weights.T)
        assert (error <= F32_TOLERANCE * (np.abs(seen) @ np.abs(weights.T))).all()


@each_table
@each_type
def test_results_are_bitwise_the_same_for_every_tile_and_split(table: str, type_: TensorType) -> None:
    rows, columns = 43, 2 * type_.block_values if type_.block_values > 1 else 61
    raw, x = random_matrix(type_, rows, columns), random_activations(32, columns)
    whole = multiply(table, type_, raw, rows, x)
    for tile_tokens in (1, 2, 3, 5, 8, 31):
        assert np.array_equal(whole, multiply(table, type_, raw, rows, x, tile_tokens=tile_tokens))
    for groups_per_call in (1, 2, 3, 5):
        for tokens in (1, 2, 7, 32):
            part = multiply(table, type_, raw, rows, x[:tokens], groups_per_call=groups_per_call)
            assert np.array_equal(whole[:tokens], part)


FILLS = {"zeros": 0x00, "ones": 0xFF, "low": 0x0F, "high": 0xF0, "odd": 0x55, "even": 0xAA, "min": 0x80, "max": 0x7F}


# Where the small scales of a super-block lie.
SCALE_BYTES = {
    TensorType.Q2_K: slice(0, 16),
    TensorType.Q3_K: slice(96, 108),
    TensorType.Q4_K: slice(4, 16),
    TensorType.Q5_K: slice(4, 16),
    TensorType.Q6_K: slice(192, 208),
}


def extreme_matrix(type_: TensorType, fill: int, rows: int, columns: int) -> Bytes:
    """Every byte is `fill`, or in the last half of the rows its complement at random; all f16 scales are 1.

    Super-blocks take their small scales from the extremes instead, a different one in each row.
    """
    stored = np.full((rows, columns // type_.block_values, type_.block_bytes), fill, np.uint8)
    last_half = stored[rows // 2 :]
    last_half ^= np.random.default_rng(fill).choice(np.array([0, 255], np.uint8), last_half.shape)
    if type_ in SCALE_BYTES:
        stored[:, :, SCALE_BYTES[type_]] = np.resize([0x80, 0x7F, 0xFF, 0x00], rows)[:, None, None]
    stored = stored.reshape(-1, type_.block_bytes)
    set_halves(stored, type_, np.ones((), np.float16))
    return stored.reshape(-1)


def extreme_step(step: int, columns: int) -> Floats:
    """Activations that quantise to -127 and 127 with scale 1 in one block of 32, and to zero elsewhere."""
    signs = np.random.default_rng(step).choice([-127.0, 127.0], 32)
    patterns = [np.full(32, 127.0), np.full(32, -127.0), signs, np.resize([127.0, -127.0], 32)]
    x = np.zeros((len(patterns), columns), np.float32)
    x[:, 32 * step : 32 * step + 32] = patterns
    return x


@each_table
@each_quantized
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS.keys())
def test_sums_of_extreme_quants_are_exact(table: str, type_: TensorType, fill: int) -> None:
    rows, columns = 16, 256
    raw = extreme_matrix(type_, fill, rows, columns)
    weights = weights_of_kernel(table, type_, dequantize(raw, type_, (rows, columns)))
    for step in range(columns // 32):
        x = extreme_step(step, columns)
        for tile_tokens in (1, 4):
            result = multiply(table, type_, raw, rows, x, tile_tokens=tile_tokens)
            assert np.array_equal(result, x.astype(np.float64) @ weights.T)


@each_table
@each_quantized
def test_a_row_with_nan_and_infinite_scales_spoils_no_other_row(table: str, type_: TensorType) -> None:
    rows, columns = 16, 2 * type_.block_values
    clean, x = random_matrix(type_, rows, columns), random_activations(6, columns)
    stored = clean.copy().reshape(rows, 2, type_.block_bytes)
    set_halves(stored[3], type_, np.array([np.nan, np.inf], np.float16))
    result = multiply(table, type_, stored.reshape(-1), rows, x)
    others = np.arange(rows) != 3
    assert np.isnan(result[:, 3]).all()
    assert np.array_equal(result[:, others], multiply(table, type_, clean, rows, x)[:, others])


@each_table
@each_type
def test_a_token_with_nan_spoils_no_other_token(table: str, type_: TensorType) -> None:
    rows, columns = 9, 256
    raw, x = random_matrix(type_, rows, columns), random_activations(3, columns)
    clean = multiply(table, type_, raw, rows, x)
    x[1, 40] = np.nan
    result = multiply(table, type_, raw, rows, x)
    assert np.isnan(result[1]).all()
    assert np.array_equal(result[[0, 2]], clean[[0, 2]])


@each_table
@each_quantized
def test_many_rows_at_once_have_the_bits_of_a_few(table: str, type_: TensorType) -> None:
    """Tables that round take more than a tile of rows in one call, and columns in several panels."""
    rows, columns = 41, 1024
    raw = random_matrix(type_, rows, columns)
    for tokens in (33, 63, 65, 97):
        x = random_activations(tokens, columns)
        whole = multiply(table, type_, raw, rows, x)
        assert np.array_equal(whole, multiply(table, type_, raw, rows, x, tile_tokens=32, groups_per_call=3))
        assert np.array_equal(whole[-1:], multiply(table, type_, raw, rows, x[-1:]))


@pytest.mark.skipif("avx512_amx" not in TABLES, reason="this CPU has no AMX")
@each_quantized
@pytest.mark.parametrize("scale", [1.0, 1e-37, 1e37], ids=["normal", "subnormal", "overflowing"])
def test_tiles_in_software_have_the_bits_of_those_in_hardware(type_: TensorType, scale: float) -> None:
    rows, columns = 43, 1280
    raw, x = random_matrix(type_, rows, columns), random_activations(70, columns) * np.float32(scale)
    hardware, software = (multiply(table, type_, raw, rows, x) for table in ("avx512_amx", "avx512_amx_emulated"))
    assert np.array_equal(hardware, software, equal_nan=True)
