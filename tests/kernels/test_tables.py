"""The tables this CPU can run."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from kvarn.backends.native import _native
from kvarn.backends.native._native import kernels
from tests.kernels.support import rounds


def test_the_scalar_table_is_always_there_and_last() -> None:
    assert kernels.tables()[-1] == "scalar"


def test_an_unknown_table_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'sse9'.*scalar"):
        kernels.argmax("sse9", np.zeros(1, np.float32))


def test_every_kernel_of_the_scalar_table_is_its_own() -> None:
    assert set(_native.kernel_origins("scalar").values()) == {"scalar"}


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="a table of x86")
@pytest.mark.parametrize(
    ("kernel", "origin"),
    [
        ("matmul_q4_0", "avx512_vnni"),
        ("attend_f16", "avx512"),
        ("silu_mul", "avx512"),
        ("matmul_f32", "avx2"),
        ("layer_norm", "avx2"),
        ("low_rank_in_f16", "avx2"),
        ("store_kv_q8_0", "avx2"),
        ("store_kv_f32", "scalar"),
    ],
)
def test_a_kernel_is_credited_to_the_set_that_brought_it_along(kernel: str, origin: str) -> None:
    assert _native.kernel_origins("avx512_vnni")[kernel] == origin


@pytest.mark.parametrize("table", kernels.tables())
def test_every_kernel_of_every_table_has_an_origin(table: str) -> None:
    origins = _native.kernel_origins(table)
    assert len(origins) == 39 + rounds(table)
    assert set(origins.values()) <= set(kernels.tables())
    assert table in origins.values()


def test_a_table_that_is_not_in_the_build_has_no_origins() -> None:
    with pytest.raises(ValueError, match="no kernel table 'sse9' in this build"):
        _native.kernel_origins("sse9")


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="tables of x86")
@pytest.mark.parametrize("table", ["avx512_amx", "avx512_amx_emulated"])
def test_the_table_with_tiles_rounds_rows_and_takes_the_rest_from_its_parents(table: str) -> None:
    origins = _native.kernel_origins(table)
    assert origins["round_row"] == origins["matmul_q6_k"] == table
    assert (origins["attend_f16"], origins["matmul_f16"]) == ("avx512", "avx2")


def test_an_emulated_table_is_never_chosen() -> None:
    assert not set(kernels.emulated_tables()) & set(kernels.tables())
