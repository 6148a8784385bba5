"""Jina's and Nomic's encoders in their authors' layouts: the reference against transcriptions, the backends against
the reference."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.errors import ModelError
from kvarn.formats.open import open_weights
from kvarn.models.architectures.jina import ADAPTERS
from kvarn.models.describe import describe
from tests.authors_encoders import MODELS, SHAPES, Encoder, Float32, authors_gguf, flash_layout
from tests.parity.test_encoders import CLOSE, TEXTS, TOLERANCE, vectors_of
from tests.tiny_encoders import encoder_folder
from tests.torch_backend import torch_cpu

torch = pytest.importorskip("torch")

ARCHITECTURES = {"jina_bert": "jina-bert-v2", "nomic_moe": "nomic-bert-moe"}


class Made:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = cache(lambda family, shape: MODELS[family](shape))
        self.folder = cache(lambda family, shape: self.model(family, shape).save(folder / f"{family}-{shape}"))
        self.reference = cache(lambda family, shape: vectors_of(ReferenceBackend(), self.folder(family, shape)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("authors"))


def expected_of(model: Encoder) -> Float32:
    with torch.no_grad():
        return np.stack([model.vector(ids) for ids in TEXTS])


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("family", MODELS)
def test_a_folder_gives_the_vectors_of_its_authors_code(family: str, shape: int, made: Made) -> None:
    expected = expected_of(made.model(family, shape))
    assert np.ptp(expected) > 0.1
    assert np.abs(made.reference(family, shape) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("family", MODELS)
def test_a_gguf_file_gives_the_same(family: str, shape: int, made: Made) -> None:
    if (family, shape) == ("jina_bert", 2):
        pytest.skip("the converter leaves the layer before the classifier out")
    model = made.model(family, shape)
    path = authors_gguf(made.folder(family, shape), ARCHITECTURES[family])
    for name in [name for name in model.tensors if name.endswith("experts.bias")]:
        model.tensors[name] = np.zeros_like(model.tensors[name])  # the converter leaves it out
    assert np.abs(vectors_of(ReferenceBackend(), path) - expected_of(model)).max() <= TOLERANCE
    made.model.cache_clear()


@pytest.mark.parametrize("family", MODELS)
def test_native_and_torch_give_the_reference_vectors(family: str, made: Made) -> None:
    for shape, isa in [(0, isa) for isa in _native.isa_names()] + [(1, None), (2, None)]:
        ours = vectors_of(NativeBackend(2, isa), made.folder(family, shape))
        assert np.abs(ours - made.reference(family, shape)).max() <= CLOSE
    for shape in (0, 1, 2):
        ours = vectors_of(torch_cpu(), made.folder(family, shape))
        assert np.abs(ours - made.reference(family, shape)).max() <= CLOSE


def test_scores_fall_with_the_distance_across_tiles_of_keys(made: Made) -> None:
    """Tiles of native have 64 keys, splits 512; pieces of torch 256."""
    model, path = made.model("jina_bert", 1), made.folder("jina_bert", 1)
    text = [int(i) for i in np.random.default_rng(5).integers(4, 90, 530)]
    with torch.no_grad():
        expected = model.vector(text)
    assert np.abs(vectors_of(ReferenceBackend(), path, [text])[0] - expected).max() <= TOLERANCE
    for isa in _native.isa_names():
        assert np.abs(vectors_of(NativeBackend(2, isa), path, [text])[0] - expected).max() <= CLOSE
    assert np.abs(vectors_of(torch_cpu(), path, [text])[0] - expected).max() <= CLOSE


@pytest.mark.parametrize("family", MODELS)
def test_neighbours_and_threads_change_no_bit(family: str, made: Made) -> None:
    for make in (NativeBackend, torch_cpu):
        for shape in (0, 1):
            path = made.folder(family, shape)
            together = vectors_of(make(2), path)
            alone = np.concatenate([vectors_of(make(1), path, [ids]) for ids in TEXTS])
            np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize(("family", "shape"), [("xlm-roberta", 0), ("xlm-roberta", 2), ("jina_embeddings_v3", 1)])
def test_the_layout_of_jina_v3_and_its_reranker_is_the_same_model(family: str, shape: int, tmp_path: Path) -> None:
    _, folder = encoder_folder(family, shape, tmp_path)
    other = flash_layout(folder, tmp_path / "flash")
    if (folder / "modules.json").exists():
        (other / "modules.json").symlink_to(folder / "modules.json")
        (other / "1_Pooling").symlink_to(folder / "1_Pooling")
    expected = vectors_of(ReferenceBackend(), folder)
    assert np.array_equal(vectors_of(ReferenceBackend(), other), expected)
    if family == "jina_embeddings_v3":
        found = vectors_of(ReferenceBackend(), authors_gguf(other, "jina-bert-v3"))
        assert np.abs(found - expected).max() <= TOLERANCE


def test_adapters_for_tasks_are_left_out_and_told(tmp_path: Path) -> None:
    _, folder = encoder_folder("jina_embeddings_v3", 0, tmp_path)
    adapted = flash_layout(folder, tmp_path / "adapted", num_adapters=2)
    assert any("lora_A" in name for name in load_file(adapted / "model.safetensors"))
    assert ADAPTERS in describe(open_weights(adapted)).notes
    assert np.array_equal(vectors_of(ReferenceBackend(), adapted), vectors_of(ReferenceBackend(), folder))


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("jina_bert", {"feed_forward_type": "reglu"}, "feed_forward_type"),
        ("jina_bert", {"feed_forward_type": "original"}, "feed_forward_type"),
        ("jina_bert", {"position_embedding_type": "absolute"}, "position_embd"),
        ("jina_bert", {"emb_pooler": "cls"}, "emb_pooler"),
        ("nomic_moe", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
        ("nomic_moe", {"expert_choice_router": True}, "expert_choice_router"),
        ("nomic_moe", {"num_experts": 9}, "ffn_up_exps"),
        ("nomic_moe", {"moe_top_k": 9}, "9 of 4 experts"),
        ("nomic_moe", {"moe_every_n_layers": 1}, "num_experts"),
        ("nomic_moe", {"mlp_fc2_bias": False}, "one matrix"),
        ("nomic_moe", {"num_shared_experts": 1}, "num_shared_experts"),
    ],
)
def test_what_makes_another_model_is_refused_by_name(
    family: str, changes: dict[str, Any], name: str, made: Made, tmp_path: Path
) -> None:
    source = made.folder(family, 0)
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=name):
        describe(open_weights(tmp_path))


def test_tensors_of_other_shapes_are_refused_by_name(made: Made, tmp_path: Path) -> None:
    source = made.folder("nomic_moe", 0)
    tensors = load_file(source / "model.safetensors")
    name = "encoder.layers.1.mlp.experts.mlp.w2"
    save_file(tensors | {name: tensors[name][:-1]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(source / "config.json")
    with pytest.raises(ModelError, match="ffn_down_exps"):
        describe(open_weights(tmp_path))
