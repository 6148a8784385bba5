"""The two products of an adapter's pair: against double arithmetic, and the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.backends.native._native import kernels
from kvarn.formats.weights import TensorType
from tests.kernels.support import F32_TOLERANCE, TABLES, Doubles, Floats

HELD = {TensorType.F16: np.float16, TensorType.F32: np.float32}


def packed(values: Floats, held: TensorType) -> tuple[np.ndarray, Doubles]:
    """A matrix as the kernel reads it, and its values as it holds them."""
    stored = values.astype(HELD[held])
    return kernels.pack(held.id, stored.reshape(-1).view(np.uint8), *values.shape), stored.astype(np.float64)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("rank", "columns", "rows"), [(1, 1, 1), (8, 64, 64), (3, 33, 21), (16, 130, 40), (21, 96, 7)])
def test_a_pair_is_the_product_of_its_halves(table: str, held: TensorType, rank: int, columns: int, rows: int) -> None:
    rng = np.random.default_rng(rank)
    x, base = (rng.standard_normal(n).astype(np.float32) for n in (columns, rows))
    a, exact_a = packed(rng.standard_normal((rank, columns)).astype(np.float32), held)
    b, exact_b = packed(rng.standard_normal((rows, rank)).astype(np.float32), held)
    low, out = kernels.low_rank(table, held.id, a, b, x, 0.75, base, rank)
    terms = 0.75 * (np.abs(exact_a) @ np.abs(x))
    assert (np.abs(low[:rank] - 0.75 * (exact_a @ x)) <= F32_TOLERANCE * terms).all()
    expected, sizes = (
        base + exact_b @ low[:rank].astype(np.float64),
        np.abs(base) + np.abs(exact_b) @ np.abs(low[:rank]),
    )
    assert (np.abs(out - expected) <= F32_TOLERANCE * sizes).all()


@pytest.mark.parametrize("table", TABLES)
def test_rows_of_a_pair_have_the_same_bits_in_any_piece(table: str) -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((72, 8)).astype(np.float32)
    x, base = rng.standard_normal(64).astype(np.float32), rng.standard_normal(72).astype(np.float32)
    a, _ = packed(rng.standard_normal((8, 64)).astype(np.float32), TensorType.F16)
    _, whole = kernels.low_rank(table, 1, a, packed(values, TensorType.F16)[0], x, 1.0, base, 8)
    for begin, end in ((0, 8), (8, 40), (40, 45), (64, 72)):
        piece = packed(values[begin:end], TensorType.F16)[0]
        _, found = kernels.low_rank(table, 1, a, piece, x, 1.0, base[begin:end], 8)
        assert np.array_equal(found, whole[begin:end])
