"""Picks of packed products: kept on disk with those of dense ones, and taken from there only where they are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvarn.backends.torch.cuda.pick_store import Foundation, PickStore

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvarn.backends.torch.cuda.quantized import matmuls  # noqa: E402
from kvarn.backends.torch.cuda.quantized.products import PackedTiling  # noqa: E402

HERE = Foundation("NVIDIA H200", "9.0", 132, "12.8", "2.11.0", "12.8", "3.6.0", "0123456789abcdef")
KEY: Any = (1, 4096, 4096, "Q4_K", 1, torch.bfloat16)
LISTED = matmuls.TILINGS[8]


@pytest.fixture(autouse=True)
def _any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda *_: None)  # torch may be without CUDA


def test_a_pick_comes_back_from_disk(tmp_path: Path) -> None:
    many = (256, *KEY[1:])
    first = matmuls.QuantizedMatmuls(PickStore(HERE, tmp_path))
    first.packed_picks = {KEY: LISTED[3], many: None}
    first._keep_packed([KEY, many])
    store = PickStore(HERE, tmp_path)
    assert matmuls._restored(store.find(matmuls._name(KEY)), LISTED, 1) == (LISTED[3],)
    assert matmuls._restored(store.find(matmuls._name(many)), LISTED, 256) == (None,)


@pytest.mark.parametrize("stored", [None, [], [None], [[8, 32]], [[1, 2, 3, 4, 5]], [[], 1], ["8"], [{}]])
def test_what_could_not_be_picked_is_timed_again(stored: Any) -> None:
    assert matmuls._restored(stored, LISTED, 1) is None


def test_what_is_found_for_one_row_is_taken_for_few(tmp_path: Path) -> None:
    picks = matmuls.QuantizedMatmuls(PickStore(HERE, tmp_path))
    picks.packed_picks, picks._packed_close = {KEY: LISTED[0]}, {KEY: [LISTED[1]]}
    times = iter([10.0, 9.0])
    picks.refine(1, lambda: next(times))
    assert {key[0]: pick for key, pick in picks.packed_picks.items()} == dict.fromkeys((1, 4, 8), LISTED[1])
    found = PickStore(HERE, tmp_path).find(matmuls._name((8, *KEY[1:])))
    assert found is not None
    assert PackedTiling(*found[0]) == LISTED[1]
