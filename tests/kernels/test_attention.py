"""Attention over tiles of cached keys, and the cache's own rounding and layout."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.backends.native._native import kernels
from tests.kernels.support import F32_TOLERANCE, TABLES, Doubles, Floats

pytestmark = pytest.mark.parametrize("table", TABLES)


def normal(*shape: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference(q: Floats, k: Doubles, v: Doubles, scale: float, softcap: float) -> tuple[Doubles, Doubles]:
    """Attention in double, and the bound on a float kernel's error."""
    scores = scale * (q.astype(np.float64) @ k.T)
    score_error = F32_TOLERANCE * scale * (np.abs(q) @ np.abs(k.T))
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
        score_error += 5e-7 * np.abs(scores)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    # Each weight is off by its score's error, the maximum's, and a few roundings of exp and of the sums.
    relative = 2 * score_error.max(axis=1, keepdims=True) + 4 * F32_TOLERANCE
    return weights @ v, relative * (weights @ np.abs(v))


@pytest.mark.parametrize("is_f16", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 128, 256])
def test_attention_agrees_with_double_arithmetic(table: str, head_dim: int, softcap: float, is_f16: bool) -> None:
    heads, num_keys, scale = 3, 150, head_dim**-0.5
    q = normal(heads, head_dim, seed=1) * np.float32(3)
    k, v = normal(num_keys, head_dim, seed=2), normal(num_keys, head_dim, seed=3)
    for first, last in [(0, 150), (0, 1), (5, 64), (63, 65), (20, 131), (149, 150)]:
        _, total, acc = kernels.attend(table, q, k, v, first, last, scale, softcap, is_f16)
        stored = (k.astype(np.float16), v.astype(np.float16)) if is_f16 else (k, v)
        seen_k, seen_v = (part[first:last].astype(np.float64) for part in stored)
        expected, bound = reference(q, seen_k, seen_v, scale, softcap)
        assert (np.abs(acc / total[:, None] - expected) <= bound).all()


@pytest.mark.parametrize("is_f16", [True, False])
@pytest.mark.parametrize("head_dim", [20, 64, 80])
def test_a_head_gets_the_same_bits_in_any_company(table: str, head_dim: int, is_f16: bool) -> None:
    q = normal(9, head_dim, seed=4)
    k, v = normal(100, head_dim, seed=5), normal(100, head_dim, seed=6)
    alone = [kernels.attend(table, q[h : h + 1], k, v, 3, 97, 0.2, 0.0, is_f16) for h in range(9)]
    for num_heads in (2, 3, 4, 5, 7, 9):
        m, total, acc = kernels.attend(table, q[:num_heads], k, v, 3, 97, 0.2, 0.0, is_f16)
        for head in range(num_heads):
            assert m[head] == alone[head][0][0]
            assert total[head] == alone[head][1][0]
            assert np.array_equal(acc[head], alone[head][2][0])


@pytest.mark.parametrize("is_f16", [True, False])
def test_hidden_keys_leave_no_trace(table: str, is_f16: bool) -> None:
    q, k, v = normal(3, 64, seed=7), normal(96, 64, seed=8), normal(96, 64, seed=9)
    clean = kernels.attend(table, q, k, v, 5, 83, 0.125, 0.0, is_f16)
    for part in (k, v):
        part[:5] = np.nan
        part[83:] = np.inf
    for before, after in zip(clean, kernels.attend(table, q, k, v, 5, 83, 0.125, 0.0, is_f16), strict=True):
        assert np.array_equal(before, after)


def test_running_maximum_is_that_of_all_visible_scores(table: str) -> None:
    q, k, v = normal(2, 64, seed=1), normal(200, 64, seed=2), normal(200, 64, seed=3)
    m, _, _ = kernels.attend(table, q, k, v, 0, 200, 0.125, 0.0, False)
    scores = 0.125 * (q.astype(np.float64) @ k.T.astype(np.float64))
    np.testing.assert_allclose(m, scores.max(axis=1), rtol=1e-5)


def awkward_floats() -> Floats:
    """Floats around every f16 boundary: ties, subnormals, overflow, NaN."""
    halves = np.arange(0, 0x7C01, 7, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:-1] + halves[1:]) / 2
    edges = np.array([0, -0.0, 65519.9, 65520, 1e30, np.inf, -np.inf, np.nan, 2**-25, 2**-24, 1e-30], np.float32)
    between = np.random.default_rng(0).standard_normal(2000).astype(np.float32) * np.float32(2.0) ** -14
    values = np.concatenate([halves, -ties, ties, edges, between])
    return values[: len(values) // 64 * 64].reshape(-1, 64)


def test_stored_keys_and_values_are_rounded_to_nearest_even(table: str) -> None:
    keys = awkward_floats()
    values = keys[::-1].copy()
    k, v = kernels.store_kv_f16(table, keys, values)
    with np.errstate(over="ignore"):
        expected_k, expected_v = keys.astype(np.float16), values.astype(np.float16)
    got_k = k.transpose(0, 2, 1).reshape(-1, 64)[: len(keys)].view(np.float16)
    got_v = v.reshape(-1, 64)[: len(keys)].view(np.float16)
    assert np.array_equal(got_k, expected_k, equal_nan=True)
    assert np.array_equal(got_v, expected_v, equal_nan=True)
    assert np.array_equal(np.signbit(got_k), np.signbit(expected_k))
