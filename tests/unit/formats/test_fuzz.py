"""Random damage to valid files: they open or fail with a ModelError, and what opens lies inside the file.

A few seconds in `make test`, ten minutes for each format under `--long`, from the same code.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from kvarn.errors import ModelError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import WeightSource
from tests import gguf_maker as maker
from tests.conftest import Size

BATCH = 250
NUMBERS = [0, 1, 2, 7, 8, 9, 13, 31, 32, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**42 + 1]
NUMBERS += [2**48, 2**61 + 1, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]

Edit = tuple[str, int, int]
edits = st.lists(
    st.one_of(
        st.tuples(st.just("byte"), st.integers(0), st.integers(0, 255)),
        st.tuples(st.just("uint32"), st.integers(0), st.sampled_from(NUMBERS)),
        st.tuples(st.just("uint64"), st.integers(0), st.sampled_from(NUMBERS)),
        st.tuples(st.just("copy"), st.integers(0), st.integers(0, 2**16)),
        st.tuples(st.just("insert"), st.integers(0), st.integers(0, 40)),
        st.tuples(st.just("delete"), st.integers(0), st.integers(1, 40)),
        st.tuples(st.just("cut"), st.integers(0), st.just(0)),
    ),
    min_size=1,
    max_size=6,
)


def damage(data: bytes, changes: list[Edit], reach: int) -> bytes:
    """Apply edits within the first `reach` bytes, where the structure is."""
    for kind, where, what in changes:
        at = where % max(1, min(reach, len(data)))
        if kind == "cut":
            data = data[:at]
        elif kind == "delete":
            data = data[:at] + data[at + what :]
        else:
            piece = _piece(kind, what, data)
            data = data[:at] + piece + data[at + (0 if kind == "insert" else len(piece)) :]
    return data


def _piece(kind: str, what: int, data: bytes) -> bytes:
    if kind in ("byte", "uint32", "uint64"):
        width = {"byte": 1, "uint32": 4, "uint64": 8}[kind]
        return (what % 256**width).to_bytes(width, "little")
    return bytes(what) if kind == "insert" else data[what % max(1, len(data)) :][:24]


def exercise(source: WeightSource, num_bytes: int) -> None:
    """Use everything an opened file offers."""
    for key, value in source.metadata.items():
        assert isinstance(key, str)
        if not isinstance(value, str | int | float | dict):
            assert len(list(value)) == len(value)
    ranges = []
    for name, info in source.tensors.items():
        raw = source.raw(name)
        assert raw.size == info.num_bytes <= num_bytes
        assert source.array(name).shape == info.shape
        begin = raw.__array_interface__["data"][0]
        ranges.append((begin, begin + raw.size))
    ranges.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    source.release_pages(source.tensors)


def fuzz(check: Callable[[list[Edit]], None], duration_s: float) -> int:
    """Run batches of examples until the time is up; return how many."""
    begin, num_batches = time.monotonic(), 0
    while time.monotonic() - begin < duration_s:
        run = given(edits)(check)
        run = settings(max_examples=BATCH, deadline=None, database=None, suppress_health_check=list(HealthCheck))(run)
        seed(num_batches)(run)()
        num_batches += 1
    return num_batches * BATCH


@pytest.mark.timeout(1200)
def test_a_damaged_gguf_file_opens_or_fails_with_a_model_error(tmp_path: Path, size: Size) -> None:
    path, valid = tmp_path / "model.gguf", maker.tiny()
    outcomes = {"opened": 0, "refused": 0}

    def check(changes: list[Edit]) -> None:
        path.unlink(missing_ok=True)  # a mapped file must not be rewritten
        path.write_bytes(damage(valid, changes, len(valid)))
        try:
            source = open_weights(path)
        except ModelError:
            outcomes["refused"] += 1
            return
        exercise(source, path.stat().st_size)
        source.close()
        outcomes["opened"] += 1

    assert fuzz(check, size(4, 600)) >= BATCH
    assert min(outcomes.values()) > 5


@pytest.mark.timeout(1200)
def test_a_damaged_safetensors_file_opens_or_fails_with_a_model_error(tmp_path: Path, size: Size) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    path = tmp_path / "model.safetensors"
    values = np.arange(64, dtype=np.float32).reshape(4, 16)
    valid = save({"a.weight": values, "b.weight": values.astype(np.float16), "position_ids": np.arange(4)})
    reach = 8 + int.from_bytes(valid[:8], "little")
    outcomes = {"opened": 0, "refused": 0}

    def check(changes: list[Edit]) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(damage(valid, changes, reach))
        try:
            source = open_weights(tmp_path)
        except ModelError:
            outcomes["refused"] += 1
            return
        exercise(source, path.stat().st_size)
        source.close()
        outcomes["opened"] += 1

    assert fuzz(check, size(2, 600)) >= BATCH
    assert min(outcomes.values()) > 0
