"""What a step of a canvas leaves for the next, for every type of embedding and table: against double arithmetic."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvarn.backends.batch import CanvasScores, RowSampling, SampleRows
from kvarn.backends.host_sampling import canvas_scores
from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.canvas_models import VOCAB, WIDE, canvas_gguf
from tests.torch_backend import torch_cpu

TYPES = [one for one in TensorType if one.id in (0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 30)]
ROWS = 37  # more than one tile, and no multiple of one


def rows_of(temperature: float, starts: tuple[int, ...] = (0, 5, ROWS)) -> SampleRows:
    banned = np.array([7, 140], np.int32), np.array([-1e9, 2.5], np.float32)
    masked = np.full(-(-VOCAB // 32), 0xFFFFFFFF, np.uint32)
    masked[0] = 0xFFFFFFFE
    own = {4: {"bias_ids": banned[0], "bias_values": banned[1]}, 20: {"mask": masked}}
    params = tuple(RowSampling(temperature, seed=3, position=i, **own.get(i, {})) for i in range(ROWS))
    return SampleRows(np.arange(ROWS, dtype=np.int32), params, canvas_starts=np.array(starts, np.int32))


def loaded(backend: Backend, path: Path) -> Backend:
    described = describe(open_weights(path))
    backend.load(described.spec, described.weights)
    return backend


def compare(backend: Backend, path: Path, temperature: float) -> list[CanvasScores]:
    described, rows = describe(open_weights(path)), rows_of(temperature)
    table = described.weights.array("token_embd.weight").astype(np.float64) * described.spec.embedding.scale
    hidden = np.random.default_rng(1).normal(0, 0.3, (ROWS, described.spec.width)).astype(np.float32)
    mine = hidden if isinstance(backend, NativeBackend) else pytest.importorskip("torch").from_numpy(hidden)
    logits = backend.logits(mine)
    expected = canvas_scores(lambda wanted: logits[wanted], rows, lambda p: (p @ table).astype(np.float32))
    found = backend.sample(mine, rows).canvases
    assert [len(one.best_ids) for one in found] == [b - a for a, b in pairwise(rows.canvas_starts.tolist())]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.best_ids.tolist() == theirs.best_ids.tolist()
        np.testing.assert_allclose(ours.entropy, theirs.entropy, atol=2e-5, rtol=0)
        scale = np.abs(table).max()
        np.testing.assert_allclose(np.asarray(ours.feedback), theirs.feedback, atol=2e-6 * scale * 4, rtol=0)
    return list(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("isa", _native.isa_names())
@pytest.mark.parametrize("type_", TYPES, ids=lambda one: one.name)
def test_the_mean_embedding_is_that_of_double_arithmetic(folder: Path, type_: TensorType, isa: str) -> None:
    path = canvas_gguf(WIDE, folder, type_)
    for temperature in (0.8, 0.1):
        compare(loaded(NativeBackend(2, isa), path), path, temperature)


def test_torch_computes_the_same(folder: Path) -> None:
    path = canvas_gguf(WIDE, folder)
    compare(loaded(torch_cpu(), path), path, 0.6)


def test_a_row_that_is_not_finite_has_no_token(folder: Path) -> None:
    path = canvas_gguf(WIDE, folder)
    for backend in (loaded(NativeBackend(1), path), loaded(torch_cpu(), path)):
        hidden = np.ones((ROWS, describe(open_weights(path)).spec.width), np.float32)
        hidden[3] = np.nan
        is_native = isinstance(backend, NativeBackend)
        sampled = backend.sample(hidden if is_native else pytest.importorskip("torch").from_numpy(hidden), rows_of(0.5))
        assert sampled.token_ids[3] == -1
        assert (np.delete(sampled.token_ids, 3) >= 0).all()


def test_a_canvas_does_not_depend_on_those_beside_it(folder: Path) -> None:
    path = canvas_gguf(WIDE, folder, TensorType.Q6_K)
    for backend in (loaded(NativeBackend(2), path), loaded(torch_cpu(), path)):
        width = describe(open_weights(path)).spec.width
        hidden = np.random.default_rng(1).normal(0, 0.3, (ROWS, width)).astype(np.float32)
        mine = hidden if isinstance(backend, NativeBackend) else pytest.importorskip("torch").from_numpy(hidden)
        both, rows = backend.sample(mine, rows_of(0.5)).canvases, rows_of(0.5)
        alone = SampleRows(rows.rows[5:], rows.params[5:], canvas_starts=np.array([0, ROWS - 5], np.int32))
        (one,) = backend.sample(mine, alone).canvases
        assert np.array_equal(np.asarray(one.feedback), np.asarray(both[1].feedback))
        assert np.array_equal(one.entropy, both[1].entropy)
