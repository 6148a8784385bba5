"""Kernels that cannot be built here: plain operations compute instead, and the log says why.

There is no GPU: what stands for its kernels fails with Triton's frames in the trace, as a missing C compiler does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvarn.backends.protocol import Backend
from kvarn.errors import BackendError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.running import all_logits, layout_of, scattered_table
from tests.tiny_models import VOCAB, tiny_model
from tests.torch_backend import torch_cpu

pytest.importorskip("torch")

import torch

from kvarn.backends.torch.loading.kernels import is_build_failure
from kvarn.backends.torch.plain import PlainOps

if TYPE_CHECKING:
    from kvarn.backends.torch.weights import ModelWeights

IDS = [int(i) for i in np.random.default_rng(3).integers(3, VOCAB, 40)]
NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def within_triton(error: Exception) -> Callable[..., None]:
    """What raises an error in code of a module of Triton's."""
    space: dict[str, Any] = {"__name__": "triton.runtime.build", "error": error}
    exec("def build(*args, **kwargs):\n    raise error", space)
    build: Callable[..., None] = space["build"]
    return build


class Kernels(PlainOps):
    """Stands for a GPU's kernels, of which those for packed matrices read them as they are."""

    reads_packed = True

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._build = within_triton(error)

    def prepare(self, weights: ModelWeights) -> None:
        self._build(weights)


def loaded(backend: Backend, path: Path) -> Backend:
    description = describe(open_weights(path))
    backend.load(description.spec, description.weights)
    layout = layout_of(description.spec, "f32")
    backend.reserve_kv(layout, 32 * layout.block_bytes)
    return backend


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path, "gguf", type=TensorType.Q4_0)


def test_a_kernel_that_cannot_be_built_at_load_leaves_plain_operations(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = scattered_table(32, 8)
    expected = all_logits(loaded(torch_cpu(), path), table, IDS, [len(IDS)])
    backend = torch_cpu()
    made = iter([Kernels(NO_COMPILER)])
    monkeypatch.setattr(
        backend, "_make_ops", lambda spec, *, plain=False: PlainOps() if plain else next(made), raising=True
    )
    with caplog.at_level(logging.WARNING, "kvarn.backends"):
        found = all_logits(loaded(backend, path), table, IDS, [len(IDS)])
    np.testing.assert_array_equal(found, expected)
    assert "Failed to find C compiler" in caplog.text
    assert "plain operations" in caplog.text


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_kernel_that_cannot_be_built_before_the_first_step(
    path: Path, is_packed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = scattered_table(32, 8)
    expected = all_logits(loaded(torch_cpu(), path), table, IDS, [len(IDS)])
    backend = torch_cpu()
    kernels = Kernels(NO_COMPILER)
    monkeypatch.setattr(kernels, "prepare", lambda weights: None)
    monkeypatch.setattr(kernels, "reads_packed", is_packed)
    monkeypatch.setattr(
        backend, "_make_ops", lambda spec, *, plain=False: PlainOps() if plain else kernels, raising=True
    )
    monkeypatch.setattr(backend, "_warm_up", within_triton(NO_COMPILER), raising=True)
    if is_packed:
        with pytest.raises(BackendError, match=r'C compiler.*set gpu_weights="bf16"'):
            loaded(backend, path)
        return
    with caplog.at_level(logging.WARNING, "kvarn.backends"):
        found = all_logits(loaded(backend, path), table, IDS, [len(IDS)])
    np.testing.assert_array_equal(found, expected)
    assert "plain operations" in caplog.text


@pytest.mark.parametrize(
    ("error", "is_build"),
    [
        (NO_COMPILER, True),
        (ValueError("out of resource: shared memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
    ],
)
def test_lack_of_memory_and_a_lost_device_are_no_faults_of_a_kernel(error: Exception, is_build: bool) -> None:
    with pytest.raises(type(error)) as raised:
        within_triton(error)()
    assert is_build_failure(raised.value) is is_build


def test_errors_of_ours_are_no_faults_of_a_kernel() -> None:
    with pytest.raises(ValueError) as raised:
        int("x")
    assert not is_build_failure(raised.value)
