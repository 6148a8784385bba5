"""Types of the KV cache that only torch has: bf16 and fp8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvarn import LLM, EngineConfig
from kvarn.backends.batch import KVLayout
from kvarn.errors import ConfigError
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from tests.running import all_logits, batch_of, layout_of, scattered_table
from tests.tiny_models import tiny_model
from tests.torch_backend import torch_cpu

pytest.importorskip("torch")

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 160, 40)]


def _logits(path: Path, dtype: str, chunks: tuple[int, ...]) -> np.ndarray:
    backend, described = torch_cpu(), describe(open_weights(path))
    backend.load(described.spec, described.weights)
    layout = layout_of(described.spec, dtype)
    backend.reserve_kv(layout, 8 * layout.block_bytes)
    return all_logits(backend, scattered_table(8, 3), IDS, chunks)


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.03), ("fp8", 0.5)])
def test_logits_are_those_of_f32_but_for_the_rounding_of_keys_and_values(
    dtype: str, most: float, tmp_path: Path
) -> None:
    path = tiny_model("llama", tmp_path)
    exact, found = _logits(path, "f32", (40,)), _logits(path, dtype, (40,))
    distance = np.abs(found - exact).max() / np.std(exact)
    assert 0 < distance < most
    np.testing.assert_array_equal(_logits(path, dtype, (7, 1, 32)), found)


def test_values_too_large_for_fp8_become_its_largest_number() -> None:
    import torch

    from kvarn.backends.torch.cache import DeviceCache

    cache = DeviceCache(KVLayout(16, ((1, 4),), "fp8"), 2, torch.device("cpu"))
    rows = torch.tensor([[[1e6, -1e6, 1.0, 0.0]]])
    cache.store(0, torch.tensor([17]), rows, rows)
    assert cache.rows(0)[0][torch.tensor([17])].float().tolist() == [[[448.0, -448.0, 1.0, 0.0]]]


@pytest.mark.parametrize(("backend", "dtype"), [("native", "bf16"), ("reference", "fp8"), ("torch", "q8_0")])
def test_a_type_that_a_backend_does_not_have_is_refused_with_those_it_has(
    backend: str, dtype: str, tmp_path: Path
) -> None:
    config = EngineConfig(backend=backend, kv_dtype=dtype, context=64)
    with pytest.raises(ConfigError, match=f"kv_dtype is '{dtype}'.*{backend}.*choose one of f16, f32"):
        LLM(str(tiny_model("llama", tmp_path, "gguf")), config=config)


def test_batch_of_one_row_reads_what_was_cached_in_a_type_of_one_byte(tmp_path: Path) -> None:
    backend, described = torch_cpu(), describe(open_weights(tiny_model("llama", tmp_path)))
    backend.load(described.spec, described.weights)
    layout = layout_of(described.spec, "fp8")
    backend.reserve_kv(layout, 8 * layout.block_bytes)
    table = scattered_table(8, 3)
    whole = backend.logits(backend.forward(batch_of([(IDS, 0)], table)))
    again = backend.logits(backend.forward(batch_of([(IDS[-1:], len(IDS) - 1)], table)))
    np.testing.assert_array_equal(again[-1], whole[-1])
