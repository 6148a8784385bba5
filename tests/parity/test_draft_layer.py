"""Layers that predict further tokens: the reference and the core against transformers' own layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvarn.backends.batch import Batch
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.draft_layers import DraftLayerOracle, Float32
from tests.family_gguf import family_gguf
from tests.running import layout_of
from tests.tiny_families import SHAPES, VOCAB

FAMILIES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "hy_v3")
IDS = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 30)]
CHUNKS = (5, 7, 1, 16)
TOLERANCE = 1e-4
BACKENDS = {"reference": ReferenceBackend, "native": lambda: NativeBackend(2)}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("drafts")
    return cache(lambda family, shape: DraftLayerOracle(family, shape, folder))


def logits_of(path: Path, states: Float32, make: object, chunks: tuple[int, ...] = CHUNKS) -> Float32:
    """What a backend's layer says, with the model's embedding and head, fed in chunks."""
    source = open_weights(path)
    model: Backend = make()  # type: ignore[operator]
    layer: Backend = make()  # type: ignore[operator]
    try:
        whole = describe(source)
        own = whole.draft
        assert own is not None
        model.load(whole.spec, whole.weights)
        layer.load(own.spec, own.weights)
        layout = layout_of(own.spec)
        layer.reserve_kv(layout, 4 * layout.block_bytes)
        found, start = [], 0
        for length in chunks:
            rows = slice(start, start + length)
            tokens = np.array(IDS[1:][rows], np.int32)
            batch = Batch(
                token_ids=np.zeros(length, np.int32),
                positions=np.arange(start, start + length, dtype=np.int32),
                row_starts=np.array([0, length], np.int32),
                context_lens=np.array([start + length], np.int32),
                block_tables=np.array([[2, 0]], np.int32),
                output_rows=np.arange(length, dtype=np.int32),
                inputs=np.concatenate([model.embed_tokens(tokens), states[rows]], axis=1),  # type: ignore[attr-defined]
            )
            found.append(model.logits(layer.forward(batch)))
            start += length
        return np.concatenate(found)
    finally:
        model.close()
        layer.close()
        source.close()


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_predicts_what_it_does_in_transformers(oracle, family: str, shape: int, backend: str) -> None:
    made = oracle(family, shape)
    found = logits_of(made.path, made.states(IDS), BACKENDS[backend])
    assert np.abs(found - made.logits(IDS)).max() <= TOLERANCE


@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])  # the gguf package has no names of such layers for others
@pytest.mark.parametrize("backend", BACKENDS)
def test_gguf_says_the_same_as_the_folder(oracle, family: str, backend: str) -> None:
    made = oracle(family, 0)
    found = logits_of(family_gguf(made.path, TensorType.F32), made.states(IDS), BACKENDS[backend])
    assert np.abs(found - made.logits(IDS)).max() <= TOLERANCE


def test_rows_of_a_layer_do_not_depend_on_the_chunks(oracle) -> None:
    made = oracle("deepseek_v3", 0)
    states = made.states(IDS)
    found = [logits_of(made.path, states, BACKENDS["native"], chunks) for chunks in ((29,), (1,) * 29, CHUNKS)]
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_a_model_is_the_same_with_the_layer_and_without(oracle) -> None:
    source = open_weights(oracle("glm4_moe", 0).path)
    assert describe(source).spec.draft is not None
    assert not any("nextn" in name or name.startswith("blk.4.") for name in describe(source).weights.tensors)
    source.close()


def test_a_layer_without_some_of_its_tensors_is_left_out_and_told(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    made = DraftLayerOracle("glm4_moe", 0, tmp_path)
    tensors = load_file(made.path / "model.safetensors")
    save_file({n: v for n, v in tensors.items() if "hnorm" not in n}, made.path / "model.safetensors")
    source = open_weights(made.path)
    found = describe(source)
    source.close()
    assert found.draft is None
    assert any("further tokens is left out" in note and "hnorm" in note for note in found.notes)
