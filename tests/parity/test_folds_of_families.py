"""Scales folded into the neighbouring weights of every kind of layer: the function stays, whatever reads a norm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.native.backend import NativeBackend
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.weights import WeightSource
from kvarn.models.describe import describe
from kvarn.quantization.folding.folds import FoldedWeights, folds
from tests.running import all_logits, layout_of, scattered_table

pytest.importorskip("torch")
pytest.importorskip("transformers")

# One norm for attention and feed-forward (cohere, phi) or a state (falcon_h1); two norms side by side; low-rank maps
# beside, inputs of each layer, other mixers, experts, norms behind the sublayers.
FAMILIES = ["cohere", "cohere2", "phi", "falcon_h1", "stablelm", "gemma3n_text", "gemma4_text", "qwen3_next", "lfm2"]
FAMILIES += ["gpt_oss", "olmo3", "nemotron", "nemotron_h", "deepseek_v2", "exaone4", "granite"]


def logits(weights: WeightSource) -> npt.NDArray[np.float32]:
    found = describe(weights)
    backend = NativeBackend(1)
    backend.load(found.spec, found.weights)
    layout = layout_of(found.spec)
    backend.reserve_kv(layout, 32 * layout.block_bytes)
    ids = [int(i) for i in np.random.default_rng(3).integers(3, found.spec.vocab_size, 24)]
    return all_logits(backend, scattered_table(32, 8), ids, [24])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fold_changes_no_logits(family: str, tmp_path: Path) -> None:
    from tests.family_gguf import family_gguf
    from tests.tiny_families import family_folder

    file = GGUFFile(family_gguf(family_folder(family, 0, tmp_path)[1]))
    rng = np.random.default_rng(0)
    scales = {
        fold: np.exp(0.5 * rng.standard_normal(fold.channels)).astype(np.float32)
        for fold in folds(describe(file).spec, file.tensors)
    }
    assert scales
    np.testing.assert_allclose(logits(FoldedWeights(file, scales)), logits(file), atol=1e-4)
