"""Which backend runs a model, and what is said when the fast one is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.backends import select
from kvarn.config import EngineConfig
from kvarn.errors import ConfigError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.tiny_models import tiny_model


def test_without_the_compiled_core_the_reference_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "NATIVE_EXTENSION", "kvarn.backends.native._not_built")
    assert select.make_backend(EngineConfig(), threads=1).name == "reference"
    assert "compiled core is not installed" in caplog.text
    with pytest.raises(ConfigError, match="pip install"):
        select.make_backend(EngineConfig(backend="native"), threads=1)


def test_a_backend_asked_for_by_name_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert select.make_backend(EngineConfig(backend="reference"), threads=1).name == "reference"
    assert not caplog.text


def test_a_cpu_has_no_options_that_need_less_memory() -> None:
    assert select.memory_remedies(EngineConfig()) == []


@pytest.mark.parametrize(
    ("options", "num_gpus", "expected"),
    [
        ({}, 1, ['set kv_dtype="fp8"', "set tensor_parallel=2 (one GPU is here)"]),
        (
            {"kv_dtype": "fp8", "gpu_weights": "bf16", "tensor_parallel": 2},
            4,
            ['set gpu_weights="packed"', "set tensor_parallel=4 (4 GPUs are here)"],
        ),
    ],
)
def test_a_gpu_has_options_that_need_less_memory(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_gpus: int, expected: list[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr(select, "is_gpu", lambda config: True)
    assert select.memory_remedies(EngineConfig(backend="cuda", **options)) == expected


def test_torch_that_is_not_installed_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else found(name, *rest)
    )
    for name in ("torch", "cuda", "mps"):
        with pytest.raises(ConfigError, match=rf'"{name}".*pip install "kvarn\[torch\]"'):
            select.make_backend(EngineConfig(backend=name), threads=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"__version__": "2.3.1"}, r"torch is 2\.3\.1.*needs 2\.6 or later"),
        ({"version.cuda": None}, r"built without CUDA; install a CUDA build"),
        ({"version.cuda": "13.0"}, r"CUDA 13\.0\) sees no GPU; look at the driver"),
    ],
    ids=["too old", "no CUDA build", "no GPU"],
)
def test_a_torch_that_cannot_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], message: str
) -> None:
    torch = pytest.importorskip("torch")
    for name, value in change.items():
        monkeypatch.setattr(f"torch.{name}", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        select.make_backend(EngineConfig(backend="cuda"), threads=1)


def test_mps_insists_on_an_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no Apple GPU"):
        select.make_backend(EngineConfig(backend="mps"), threads=1)


def test_torch_takes_the_cpu_where_there_is_nothing_better(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    backend = select.make_backend(EngineConfig(backend="torch"), threads=1)
    assert (backend.name, backend.device.kind, backend.device.value_bytes) == ("torch", "cpu", 4)  # type: ignore[attr-defined]
    assert select.device_memory(EngineConfig(backend="torch")).num_bytes > 0


def test_the_plan_counts_weights_as_the_device_holds_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    description = describe(open_weights(tiny_model("llama", tmp_path, "gguf", type=TensorType.Q4_0)))
    matrices = [info for info in description.weights.tensors.values() if len(info.shape) > 1]
    held = select.device_weights(description.spec, description.weights, EngineConfig(backend="torch"))
    assert sum(held.tensors[info.name].num_bytes for info in matrices) == 4 * sum(info.num_values for info in matrices)
    name = "blk.0.attn_q.weight"
    assert np.array_equal(held.raw(name).view(np.float32), description.weights.array(name).reshape(-1))


def test_the_engine_imports_neither_torch_nor_a_server() -> None:
    heavy = ("torch", "fastapi", "pydantic")
    code = f"import kvarn.llm, kvarn.engine.load, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_blocks_are_as_long_as_the_backend_likes_them_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = [select.block_size(EngineConfig(backend=name)) for name in ("auto", "native", "torch")]
    assert found == [16, 16, 64]
    assert select.block_size(EngineConfig(backend="torch", block_size=32)) == 32
