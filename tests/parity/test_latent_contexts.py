"""Latent attention over contexts of several splits: the same bits however they are cut, and the reference's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from tests.running import Float32, all_logits, layout_of, scattered_table
from tests.torch_backend import torch_cpu

families = pytest.importorskip("tests.tiny_families")

LENGTH = 1100  # three splits of keys
IDS = [int(i) for i in np.random.default_rng(5).integers(3, families.VOCAB, LENGTH)]
BLOCKS = -(-LENGTH // 16)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = families.family_folder("minicpm3", 2, tmp_path_factory.mktemp("contexts"))[1]  # rows of 39 values
    return found


def last_logits(backend: Backend, path: Path, dtype: str, chunks: tuple[int, ...]) -> Float32:
    """Of the last tokens; of chunks the very last ones are decoded one by one."""
    described = describe(open_weights(path))
    backend.load(described.spec, described.weights)
    layout = layout_of(described.spec, dtype)
    backend.reserve_kv(layout, BLOCKS * layout.block_bytes)
    return all_logits(backend, scattered_table(BLOCKS, BLOCKS), IDS, chunks)[-40:]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a_long_context_has_the_same_bits_however_it_is_cut(dtype: str, path: Path) -> None:
    whole = last_logits(NativeBackend(1), path, dtype, (LENGTH,))
    cut = last_logits(NativeBackend(3), path, dtype, (1000, 61, 36, 1, 1, 1))
    np.testing.assert_array_equal(cut, whole)
    defined = last_logits(ReferenceBackend(), path, dtype, (LENGTH,))
    size = float(np.abs(defined).max())
    np.testing.assert_allclose(whole, defined, atol=2e-5 * max(1.0, size))  # measured: 1e-5 in f16


def test_torch_cuts_a_long_context_without_a_trace(path: Path) -> None:
    whole = last_logits(torch_cpu(1), path, "f16", (LENGTH,))
    np.testing.assert_array_equal(last_logits(torch_cpu(2), path, "f16", (1000, 97, 1, 1, 1)), whole)
