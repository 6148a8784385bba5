"""Scales folded into neighbouring weights: the function stays, AWQ's and SmoothQuant's choices, whole files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kvarn
from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.errors import ConfigError
from kvarn.evaluation.text import read_text
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType, WeightSource
from kvarn.models.describe import describe
from kvarn.models.spec import ModelSpec
from kvarn.quantization.folding.fold import FoldJob
from kvarn.quantization.folding.folds import FoldedWeights, folded_imatrix, folds
from kvarn.quantization.folding.scales import SMOOTHING, AwqSearch, smoothquant_scales
from kvarn.quantization.imatrix import ImportanceMatrix, InputStatistics
from kvarn.quantization.source import open_source
from tests.float_model import write_float_model, write_text
from tests.running import all_logits, layout_of, scattered_table
from tests.tiny_models import VOCAB, tiny_model

Float32 = npt.NDArray[np.float32]
FOLDED = ["llama", "qwen2", "qwen3", "gemma2", "gemma3"]  # GQA, biased v, norms of heads, norms on both sides


def logits(spec: ModelSpec, weights: WeightSource) -> Float32:
    backend = NativeBackend(2)
    backend.load(spec, weights)
    layout = layout_of(spec)
    backend.reserve_kv(layout, 32 * layout.block_bytes)
    ids = [int(i) for i in np.random.default_rng(3).integers(3, VOCAB, 40)]
    return all_logits(backend, scattered_table(32, 8), ids, [40])


@pytest.mark.parametrize("arch", FOLDED)
def test_a_fold_changes_no_logits(arch: str, tmp_path: Path) -> None:
    found = describe(open_weights(tiny_model(arch, tmp_path, "gguf")))
    rng = np.random.default_rng(0)
    scales = {
        fold: np.exp(rng.standard_normal(fold.channels)).astype(np.float32)
        for fold in folds(found.spec, found.weights.tensors)
    }
    assert len(scales) == 4 * len(found.spec.blocks)
    folded = FoldedWeights(found.weights, scales)
    touched = [name for name in folded.tensors if not np.array_equal(folded.array(name), found.weights.array(name))]
    assert {name.split(".")[2] for name in touched} >= {"attn_norm", "attn_q", "attn_v", "attn_output", "ffn_down"}
    np.testing.assert_allclose(logits(found.spec, folded), logits(found.spec, found.weights), atol=1e-4)


def test_matrices_that_a_file_fuses_are_left_alone(tmp_path: Path) -> None:
    path = tiny_model("phi3", tmp_path, "gguf")
    source = open_source(path)
    assert "blk.0.attn_qkv.weight" in source.weights.tensors
    found = list(folds(source.spec, source.weights.tensors))
    assert not found, "scales of one part would be taken for those of the whole"
    words = read_text(write_text(tmp_path / "text.txt"))
    with pytest.raises(ConfigError, match="use another method"):
        FoldJob(path, source, words, 1, None, has_imatrix=False).run("awq", {})


def test_statistics_follow_the_fold(tmp_path: Path) -> None:
    found = describe(open_weights(tiny_model("llama", tmp_path, "gguf")))
    fold = next(iter(folds(found.spec, found.weights.tensors)))
    scale = np.linspace(0.5, 2, fold.channels).astype(np.float32)
    entries = {fold.readers[0]: InputStatistics(np.ones((1, fold.channels), np.float32), np.ones(1, np.float32))}
    after = folded_imatrix(ImportanceMatrix(entries), FoldedWeights(found.weights, {fold: scale}))
    np.testing.assert_allclose(after.entries[fold.readers[0]].importance, scale**-2.0, rtol=1e-6)


def test_smoothquant_is_its_formula_and_for_norms_alone(tmp_path: Path) -> None:
    found = describe(open_weights(tiny_model("llama", tmp_path, "gguf")))
    by_input = {fold.input: fold for fold in folds(found.spec, found.weights.tensors) if fold.layer == 0}
    fold, rng = by_input["ffn_in"], np.random.default_rng(1)
    largest = rng.uniform(0.1, 30, fold.channels).astype(np.float32)
    weight = np.max([np.abs(found.weights.array(name)).max(axis=0) for name in fold.readers], axis=0)
    expected = largest**SMOOTHING / weight ** (1 - SMOOTHING)
    scales = smoothquant_scales(found.weights, fold, largest)
    assert scales is not None
    np.testing.assert_allclose(scales / scales[0], expected / expected[0], rtol=1e-5)
    assert scales.max() * scales.min() == pytest.approx(1, rel=1e-5)
    assert smoothquant_scales(found.weights, by_input["ffn_down"], largest) is None


def test_awq_protects_the_columns_that_read_large_inputs(tmp_path: Path) -> None:
    found = describe(open_weights(tiny_model("llama", tmp_path, "gguf")))
    fold = next(fold for fold in folds(found.spec, found.weights.tensors) if fold.input == "ffn_in")
    types = dict.fromkeys(fold.readers, TensorType.Q4_0)
    search = AwqSearch(found.weights, types, _native.ThreadTeam(1), has_imatrix=False)
    sizes = np.ones(fold.channels, np.float32)
    assert search.scales(fold, sizes, np.eye(fold.channels, dtype=np.float32)) is None
    sizes[::16] = 20
    scales = search.scales(fold, sizes, np.diag(sizes**2))
    assert scales is not None
    assert scales[::16].min() > 1.2 * np.median(scales)


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_a_folded_file_answers_like_its_source(method: str, tmp_path: Path) -> None:
    source = write_float_model(tmp_path / "model.gguf", width=64, hidden=96)
    text = write_text(tmp_path / "calibration.txt", seed=1, num_words=2000)
    held_out = write_text(tmp_path / "held-out.txt", seed=2)
    files = {"plain": kvarn.QuantizeOptions(), "folded": kvarn.QuantizeOptions(method=method, text=text)}
    found = {}
    for name, options in files.items():
        kvarn.quantize(source, "Q5_1", tmp_path / name, options=options)
        judged = kvarn.EvaluationOptions(chunks=4, context=128)
        report = kvarn.evaluate(tmp_path / name, text=held_out, against=source, options=judged)
        assert report.divergence is not None
        found[name] = report.divergence.kl_mean
    assert 0 < found["folded"] < 3 * found["plain"]
    norm = "blk.1.attn_norm.weight"
    before, after = GGUFFile(source).array(norm), GGUFFile(tmp_path / "folded").array(norm)
    assert not np.allclose(before, after)
