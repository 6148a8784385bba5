"""Kernels over one row of floats: quantising, norms, activations, argmax and sums of exponentials."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvarn.backends.native._native import kernels
from tests.kernels.support import F32_TOLERANCE, TABLES, Floats, rounded, rounded_by_kernel, rounds

pytestmark = pytest.mark.parametrize("table", TABLES)

LENGTHS = [1, 7, 8, 9, 31, 64, 576, 1537]


def normal(n: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def by_definition(block: Floats) -> tuple[Floats, np.float32]:
    """quantize_row of one block of 32, in float32 throughout."""
    absmax = np.abs(block).max()
    if absmax < np.float32(1e-36):
        return np.zeros(32, np.float32), np.float32(0)
    tries = [(_error(block, absmax, np.float32(level)), -level) for level in (127, 126, 125, 124)]
    level = np.float32(-min(tries)[1])
    return np.rint(block * (level / absmax)), absmax / level


def _error(block: Floats, absmax: np.float32, level: np.float32) -> np.float32:
    scaled = block * (level / absmax)
    squares = ((scaled - np.rint(scaled)) ** 2).reshape(4, 8)
    lanes = np.zeros(8, np.float32)
    for row in squares:
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    step = absmax / level
    with np.errstate(over="ignore"):
        return np.float32(lanes[0] * (step * step))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e30, 1e-35, 1e-38, 1e-44])
def test_quantising_follows_its_definition_bit_for_bit(table: str, scale: float) -> None:
    x = normal(64 * 32, scale=scale)
    x[5 * 32 : 6 * 32] = 0
    quants, scales, sums, minus_sums = kernels.quantize_row(table, x)
    for block in range(64):
        expected, expected_scale = by_definition(x[32 * block : 32 * block + 32])
        assert np.array_equal(quants[32 * block : 32 * block + 32], expected)
        assert scales[block] == expected_scale
        assert sums[block] == expected_scale * np.float32(expected.sum())
        assert minus_sums[block].tolist() == [-expected[:16].sum(), -expected[16:].sum()]


def test_quantising_rounds_ties_to_even(table: str) -> None:
    x = np.arange(60, 92, dtype=np.float32)  # whole numbers: level 127 fits best and the scale is 1
    x[:6] = [127, 0.5, 1.5, 2.5, -0.5, -2.5]
    assert kernels.quantize_row(table, x)[0][:6].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_gets_a_nan_scale(table: str, bad: float) -> None:
    x = normal(96)
    x[40] = bad
    quants, scales, sums, _ = kernels.quantize_row(table, x)
    assert np.isnan(scales).tolist() == [False, True, False]
    assert np.isnan(sums).tolist() == [False, True, False]
    assert not quants[32:64].any()


def test_rounded_rows_are_bf16_by_nearest_even(table: str) -> None:
    if not rounds(table):
        pytest.skip("this table quantises")
    x = np.concatenate([normal(2048), normal(2048, scale=1e30), np.arange(2048, dtype=np.float32) / 8])
    x[:4] = [1e-39, -1e-44, 0.0, -0.0]  # subnormals become zeros
    expected = rounded(np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x))
    assert np.array_equal(rounded_by_kernel(table, x), expected)


@pytest.mark.parametrize("n", LENGTHS)
def test_rms_norm_agrees_with_double_arithmetic(table: str, n: int) -> None:
    x, w = normal(n, 1, 3.0), normal(n, 2)
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-5) * w
    assert (np.abs(kernels.rms_norm(table, x, w, 1e-5) - expected) <= F32_TOLERANCE * np.abs(expected)).all()


@pytest.mark.parametrize("n", LENGTHS)
def test_layer_norm_agrees_with_double_arithmetic(table: str, n: int) -> None:
    x, w, b = normal(n, 1, 3.0) + np.float32(1), normal(n, 2), normal(n, 3)
    wide = x.astype(np.float64)
    scale = w / np.sqrt(wide.var() + 1e-5)
    expected = (wide - wide.mean()) * scale + b
    terms = (np.abs(wide) + abs(wide.mean())) * np.abs(scale) + np.abs(b)
    assert (np.abs(kernels.layer_norm(table, x, w, b, 1e-5) - expected) <= F32_TOLERANCE * terms).all()


@pytest.mark.parametrize("n", LENGTHS)
def test_add_is_exact(table: str, n: int) -> None:
    x, y = normal(n, 1), normal(n, 2)
    assert np.array_equal(kernels.elementwise(table, "add", x, y), x + y)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: float) -> float:
    return 0.5 * x * math.erfc(-x / math.sqrt(2))


ACTIVATIONS = {"silu_mul": silu, "gelu_tanh_mul": gelu_tanh, "gelu": gelu}


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_activations_agree_with_double_arithmetic(table: str, op: str) -> None:
    near, far = np.linspace(-12, 12, 4001), np.array([-1e4, -89, -60, 60, 89, 1e4])
    x = np.concatenate([near, far]).astype(np.float32)
    up = np.ones_like(x) if op == "gelu" else normal(len(x), 5)
    expected = np.array([ACTIVATIONS[op](float(value)) for value in x]) * up
    error = np.abs(kernels.elementwise(table, op, x, up) - expected)
    assert (error <= F32_TOLERANCE * np.abs(x.astype(np.float64) * up) + 1e-37).all()


@pytest.mark.parametrize("op", ["add", *ACTIVATIONS])
def test_an_element_does_not_depend_on_its_place(table: str, op: str) -> None:
    x, up = normal(45, 1, 4.0), normal(45, 2)
    whole = kernels.elementwise(table, op, x, up)
    for start in (1, 3, 8, 40):
        assert np.array_equal(whole[start:], kernels.elementwise(table, op, x[start:].copy(), up[start:].copy()))


def test_exp_is_within_four_units_in_the_last_place(table: str) -> None:
    for x in np.linspace(-87, 0, 3001).astype(np.float32):
        exact = math.exp(x)
        result = kernels.sum_exp(table, np.array([x]), 0.0)
        assert abs(result - exact) <= 4 * np.spacing(np.float32(exact))
    assert kernels.sum_exp(table, np.array([-200.0, -np.inf], np.float32), 0.0) == 0


@pytest.mark.parametrize("n", LENGTHS)
def test_sum_of_exponentials_adds_up_in_double(table: str, n: int) -> None:
    x = normal(n, 4, 5.0)
    expected = np.exp(x.astype(np.float64) - x.max()).sum()
    assert abs(kernels.sum_exp(table, x, float(x.max())) - expected) <= 5e-7 * expected


@pytest.mark.parametrize("n", LENGTHS)
def test_both_sums_of_a_softmax_add_up_in_double(table: str, n: int) -> None:
    x = normal(n, 4, 5.0)
    below = x.astype(np.float64) - x.max()
    plain, weighted = kernels.softmax_sums(table, x, float(x.max()))
    assert plain == kernels.sum_exp(table, x, float(x.max()))
    assert abs(weighted - (np.exp(below) * below).sum()) <= 1e-6 * np.abs(np.exp(below) * below).sum()
    hidden = np.concatenate([x, np.array([-np.inf, -1e30], np.float32)])
    assert np.isfinite(kernels.softmax_sums(table, hidden, float(x.max()))).all()


@pytest.mark.parametrize("n", LENGTHS)
def test_argmax_finds_the_largest_at_every_place(table: str, n: int) -> None:
    x = normal(n)
    for index in range(0, n, max(1, n // 20)):
        changed = x.copy()
        changed[index] = 50
        assert kernels.argmax(table, changed) == (index, 50.0)


def test_argmax_takes_the_first_of_equals_and_passes_over_nan(table: str) -> None:
    x = np.full(100, -3, np.float32)
    x[[17, 41, 90]] = 2
    x[5] = np.nan
    assert kernels.argmax(table, x) == (17, 2.0)
    assert kernels.argmax(table, np.full(20, -np.inf, np.float32)) == (0, -np.inf)
