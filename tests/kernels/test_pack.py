"""Packing moves bits only: unpacking a packed matrix gives exactly the values of the file."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.backends.native._native import kernels
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorType
from tests.kernels.support import QUANTIZED, TYPES, random_matrix


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 24])
@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_unpacking_a_packed_matrix_gives_the_dequantised_file(type_: TensorType, rows: int) -> None:
    columns = 3 * type_.block_values if type_.block_values > 1 else 37
    raw = random_matrix(type_, rows, columns)
    unpacked = kernels.unpack(type_.id, kernels.pack(type_.id, raw, rows, columns), rows, columns)
    assert np.array_equal(unpacked, dequantize(raw, type_, (rows, columns)))


@pytest.mark.parametrize("type_", QUANTIZED, ids=lambda t: t.name)
def test_any_bytes_at_all_unpack_as_they_dequantise(type_: TensorType) -> None:
    columns = 4 * type_.block_values
    raw = np.random.default_rng(3).integers(0, 256, type_.num_bytes(64 * columns), dtype=np.uint8)
    unpacked = kernels.unpack(type_.id, kernels.pack(type_.id, raw, 64, columns), 64, columns)
    expected = dequantize(raw, type_, (64, columns))
    assert not np.isfinite(expected).all()  # the scales do include NaN and infinity
    assert np.array_equal(unpacked, expected, equal_nan=True)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_rows_beyond_the_matrix_are_packed_as_zeros(type_: TensorType) -> None:
    columns = 2 * type_.block_values
    packed = kernels.pack(type_.id, random_matrix(type_, 3, columns), 3, columns)
    as_whole_group = kernels.unpack(type_.id, packed, 8, columns)
    assert np.any(as_whole_group[:3])
    assert not np.any(as_whole_group[3:])


def test_bytes_that_do_not_match_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="do not match"):
        kernels.pack(TensorType.Q8_0.id, np.zeros(34, np.uint8), 1, 64)
    with pytest.raises(ValueError, match="blocks of 256"):
        kernels.pack(TensorType.Q6_K.id, np.zeros(210, np.uint8), 1, 128)
    with pytest.raises(ValueError, match="tensor type 5 is unknown"):
        kernels.pack(5, np.zeros(34, np.uint8), 1, 32)
