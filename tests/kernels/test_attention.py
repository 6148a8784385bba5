"""Attention over tiles of cached keys, and the cache's own rounding and layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.batch import KVLayout
from kvarn.backends.native._native import kernels
from kvarn.backends.reference.attention import round_q8_0
from tests.kernels.support import F32_TOLERANCE, TABLES, Doubles, Floats

DTYPES = ["f16", "f32", "q8_0"]

pytestmark = pytest.mark.parametrize("table", TABLES)


def normal(*shape: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def kept(x: Floats, dtype: str) -> Floats:
    """What a cache of that type gives back, by its definition."""
    if dtype == "q8_0":
        return round_q8_0(x)
    return x.astype(np.float16).astype(np.float32) if dtype == "f16" else x


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 128, 256])
def test_attention_agrees_with_double_arithmetic(table: str, head_dim: int, softcap: float, dtype: str) -> None:
    heads, num_keys, scale = 3, 150, head_dim**-0.5
    q = normal(heads, head_dim, seed=1) * np.float32(3)
    k, v = normal(num_keys, head_dim, seed=2), normal(num_keys, head_dim, seed=3)
    for first, last in [(0, 150), (0, 1), (5, 64), (63, 65), (20, 131), (149, 150)]:
        _, total, acc = kernels.attend(table, q, k, v, first, last, scale, softcap, dtype)
        seen_k, seen_v = (kept(part, dtype)[first:last].astype(np.float64) for part in (k, v))
        expected, bound = reference(q, seen_k, seen_v, scale, softcap)
        assert (np.abs(acc / total[:, None] - expected) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_what_is_added_to_scores_moves_them(table: str, softcap: float, dtype: str) -> None:
    """slope * key is as good as one more dimension of q and k, but for the cap."""
    q, k, v = normal(5, 40, seed=1), normal(150, 40, seed=2), normal(150, 40, seed=3)
    slopes = [0.5, 0.0, -0.03, 0.002, -1.0]
    for first, last in [(0, 150), (5, 64), (63, 131)]:
        _, total, acc = kernels.attend(table, q, k, v, first, last, 0.2, softcap, dtype, slopes)
        seen_k, seen_v = (kept(part, dtype)[first:last].astype(np.float64) for part in (k, v))
        scores = 0.2 * (q @ seen_k.T)
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        scores += np.outer(slopes, np.arange(first, last))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weights @ seen_v / weights.sum(axis=1, keepdims=True)
        assert np.abs(acc / total[:, None] - expected).max() <= 2e-5
    plain = kernels.attend(table, q, k, v, 5, 150, 0.2, softcap, dtype)
    for a, b in zip(plain, kernels.attend(table, q, k, v, 5, 150, 0.2, softcap, dtype, [0.0] * 5), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [20, 64, 80])
def test_a_head_gets_the_same_bits_whatever_heads_share_the_call(table: str, head_dim: int, dtype: str) -> None:
    q = normal(9, head_dim, seed=4)
    k, v = normal(100, head_dim, seed=5), normal(100, head_dim, seed=6)
    alone = [kernels.attend(table, q[h : h + 1], k, v, 3, 97, 0.2, 0.0, dtype) for h in range(9)]
    for num_heads in (2, 3, 4, 5, 7, 9):
        m, total, acc = kernels.attend(table, q[:num_heads], k, v, 3, 97, 0.2, 0.0, dtype)
        for head in range(num_heads):
            assert m[head] == alone[head][0][0]
            assert total[head] == alone[head][1][0]
            assert np.array_equal(acc[head], alone[head][2][0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_keys_leave_no_trace(table: str, dtype: str) -> None:
    q, k, v = normal(3, 64, seed=7), normal(96, 64, seed=8), normal(96, 64, seed=9)
    clean = kernels.attend(table, q, k, v, 5, 83, 0.125, 0.0, dtype)
    for part in (k, v):
        part[:5] = np.nan
        part[83:] = np.inf
    for before, after in zip(clean, kernels.attend(table, q, k, v, 5, 83, 0.125, 0.0, dtype), strict=True):
        assert np.array_equal(before, after)


def test_running_maximum_is_that_of_all_visible_scores(table: str) -> None:
    q, k, v = normal(2, 64, seed=1), normal(200, 64, seed=2), normal(200, 64, seed=3)
    m, _, _ = kernels.attend(table, q, k, v, 0, 200, 0.125, 0.0, "f32")
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
    k, v = (blocks.view(np.float16) for blocks in kernels.store_kv(table, keys, values, "f16"))
    with np.errstate(over="ignore"):
        expected_k, expected_v = keys.astype(np.float16), values.astype(np.float16)
    got_k = k.reshape(-1, 64, 16).transpose(0, 2, 1).reshape(-1, 64)[: len(keys)]
    got_v = v.reshape(-1, 64)[: len(keys)]
    assert np.array_equal(got_k, expected_k, equal_nan=True)
    assert np.array_equal(got_v, expected_v, equal_nan=True)
    assert np.array_equal(np.signbit(got_k), np.signbit(expected_k))


def unpacked_q8_0(block: npt.NDArray[np.uint8], head_dim: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """The values and scales of one block as they lie."""
    return block[: 16 * head_dim].view(np.int8), block[16 * head_dim :].view(np.float16)


@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 128])
def test_q8_0_blocks_hold_what_the_definition_says(table: str, head_dim: int) -> None:
    keys, values = normal(19, head_dim, seed=1), normal(19, head_dim, seed=2) * np.float32(1e-4)
    keys[3, :5] = 0
    keys[4] = 0
    keys[5, 0] = 3e5
    values[6] *= np.float32(1e-3)  # the scale is a subnormal f16
    values[7] *= np.float32(1e-9)  # the scale is 0
    groups = -(-head_dim // 32)
    got_k, got_v = np.zeros_like(keys), np.zeros_like(values)
    for b, (k, v) in enumerate(zip(*kernels.store_kv(table, keys, values, "q8_0"), strict=True)):
        (k_whole, k_scale), (v_whole, v_scale) = unpacked_q8_0(k, head_dim), unpacked_q8_0(v, head_dim)
        for slot in range(min(16, 19 - 16 * b)):
            scale_of = np.arange(head_dim) // 32
            k_row, k_scales = k_whole.reshape(head_dim, 16)[:, slot], k_scale.reshape(groups, 16)[:, slot]
            v_row, v_scales = v_whole.reshape(16, head_dim)[slot], v_scale.reshape(16, groups)[slot]
            got_k[16 * b + slot] = k_row * k_scales[scale_of].astype(np.float32)
            got_v[16 * b + slot] = v_row * v_scales[scale_of].astype(np.float32)
    np.testing.assert_array_equal(got_k, round_q8_0(keys))
    np.testing.assert_array_equal(got_v, round_q8_0(values))


def test_q8_0_is_within_half_a_step_of_what_was_stored(table: str) -> None:
    """The step is the stored scale; beside it only the rounding of x * (1 / scale), at most 127, in float."""
    x = normal(64, 64, seed=3)
    half_step = 0.5 + 127 * 2.0**-23
    for start, block in zip(range(0, 64, 16), kernels.store_kv(table, x, x, "q8_0")[1], strict=True):
        whole, scales = unpacked_q8_0(block, 64)
        steps = np.repeat(scales.reshape(16, 2).astype(np.float64), 32, axis=1)
        error = np.abs(whole.reshape(16, 64) * steps - x[start : start + 16])
        assert (error <= half_step * steps).all()
        assert (error > 0.45 * steps).any()


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("head_dim", [20, 64, 80, 128])
def test_q8_0_gives_the_bits_of_floats_that_were_rounded_before(table: str, head_dim: int, heads: int) -> None:
    q, k, v = normal(heads, head_dim, seed=4), normal(130, head_dim, seed=5), normal(130, head_dim, seed=6)
    ours = kernels.attend(table, q, k, v, 3, 129, 0.2, 0.0, "q8_0")
    floats = kernels.attend(table, q, round_q8_0(k), round_q8_0(v), 3, 129, 0.2, 0.0, "f32")
    for a, b in zip(ours, floats, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("broken", [np.nan, np.inf, 1e20])
def test_q8_0_turns_a_group_that_is_not_finite_into_nan(table: str, broken: float) -> None:
    q, k, v = normal(1, 64, seed=7), normal(20, 64, seed=8), normal(20, 64, seed=9)
    v[4, 40] = broken
    _, total, acc = kernels.attend(table, q, k, v, 0, 20, 0.125, 0.0, "q8_0")
    assert np.isnan(acc[0, 32:]).all()
    assert np.isfinite(acc[0, :32]).all()
    assert np.isfinite(total).all()


def test_an_unknown_type_of_cache_is_refused(table: str) -> None:
    x = normal(1, 8, seed=1)
    with pytest.raises(ValueError, match="q3"):
        kernels.attend(table, x, x, x, 0, 1, 1.0, 0.0, "q3")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 128])
def test_a_block_takes_the_bytes_its_layout_says(table: str, head_dim: int, dtype: str) -> None:
    x = normal(16, head_dim, seed=1)
    k, v = kernels.store_kv(table, x, x, dtype)
    assert 16 * KVLayout(16, ((1, head_dim),), dtype).token_bytes == k.nbytes + v.nbytes
