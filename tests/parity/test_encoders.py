"""Every encoder of tests/tiny_encoders.py: the reference against transformers, the backends against the reference."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.pooling import PooledLayers
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.errors import ModelError
from kvarn.formats.open import open_weights
from kvarn.models.config.encoder_families import ENCODERS
from kvarn.models.config.keys import ANY, OF_ONE_TYPE
from kvarn.models.describe import Description, describe
from kvarn.models.spec import Encoder
from tests.damaged_models import assert_damage_is_refused
from tests.running import batch_of, layout_of
from tests.tiny_encoders import (
    DENSE,
    FAMILIES,
    POOLINGS,
    SHAPES,
    VOCAB,
    encoder_folder,
    encoder_gguf,
    nomic_of_its_authors,
)
from tests.torch_backend import torch_cpu

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Float32 = npt.NDArray[np.float32]

TOLERANCE = 1e-4
CLOSE = 5e-3  # of backends that round, beside values of about 1
RNG = np.random.default_rng(1)
WITHOUT_GGUF = {
    ("modernbert", 1),
    ("modernbert", 2),
    ("nomic_bert", 2),
    ("bert", 1),
    ("distilbert", 2),
    ("gemma3_text", 1),
    *(("jina_embeddings_v3", shape) for shape in range(3)),  # test_authors_encoders.py has it
}
TEXTS = [[int(i) for i in RNG.integers(4, VOCAB, length)] for length in (29, 7, 1)]


class Made:
    """The models of this run and what transformers makes of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.folder = cache(self._make)
        self.reference = cache(lambda family, shape: vectors_of(ReferenceBackend(), self.folder(family, shape)[0]))

    def _make(self, family: str, shape: int) -> tuple[Path, Float32]:
        model, path = encoder_folder(family, shape, self._folder)
        return path, np.stack([_expected(model, family, shape, ids) for ids in TEXTS])


def _expected(model: Any, family: str, shape: int, ids: list[int]) -> Float32:
    with torch.no_grad():
        found = model(torch.tensor([ids]))
    if "logits" in found:
        return found.logits[0].numpy()
    states = found.last_hidden_state[0].numpy()
    pooling = POOLINGS.get(family, "mean")
    vector: Float32 = states.mean(axis=0) if pooling == "mean" else states[0 if pooling == "cls" else -1]
    rng = np.random.default_rng(3)
    for width, activation, bias in DENSE.get((family, shape), ()):
        weight = rng.standard_normal((width, len(vector))).astype(np.float32) / 8
        vector = weight @ vector + (rng.standard_normal(width).astype(np.float32) if bias else 0)
        vector = np.tanh(vector) if activation == "Tanh" else vector
    return vector


def vectors_of(backend: Backend, path: Path, texts: list[list[int]] = TEXTS) -> Float32:
    """What the model makes of each text, all of them in one batch."""
    described: Description = describe(open_weights(path))
    spec = described.spec
    assert isinstance(spec.generation, Encoder)
    assert backend.unsupported(spec) == []
    backend.load(spec, described.weights)
    layout = layout_of(spec)
    blocks = -(-max(map(len, texts)) // layout.block_size)
    backend.reserve_kv(layout, (2 + blocks * len(texts)) * layout.block_bytes)
    tables = np.arange(blocks * len(texts), dtype=np.int32).reshape(len(texts), blocks)
    batch = batch_of([(ids, 0) for ids in texts], tables)
    pooled = backend.pool(backend.forward(batch), batch.row_starts, spec.generation.pooling)
    return PooledLayers.read(spec, described.weights).apply(np.asarray(pooled))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("encoders"))


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_vectors_of_transformers(family: str, shape: int, made: Made) -> None:
    _, expected = made.folder(family, shape)
    assert np.ptp(expected) > 0.1  # the random model says something
    assert np.abs(made.reference(family, shape) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_gives_the_vectors_of_transformers(family: str, shape: int, made: Made, tmp_path: Path) -> None:
    folder, expected = made.folder(family, shape)
    if (family, shape) in WITHOUT_GGUF:
        pytest.skip("GGUF has no keys for these layer types, activations, scales and classifiers")
    if family == "nomic_bert":
        folder = nomic_of_its_authors(folder, tmp_path / "authors")
        assert np.abs(vectors_of(ReferenceBackend(), folder) - expected).max() <= TOLERANCE
    path = encoder_gguf(folder)
    assert np.abs(vectors_of(ReferenceBackend(), path) - expected).max() <= TOLERANCE
    assert_damage_is_refused(open_weights(path), shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_and_torch_give_the_reference_vectors(family: str, made: Made) -> None:
    """Every set of kernels on the first shape, the best one on all."""
    for shape, isa in [(0, isa) for isa in _native.isa_names()] + [(1, None), (2, None)]:
        ours = vectors_of(NativeBackend(2, isa), made.folder(family, shape)[0])
        assert np.abs(ours - made.reference(family, shape)).max() <= CLOSE
    for shape in (0, 1, 2):
        ours = vectors_of(torch_cpu(), made.folder(family, shape)[0])
        assert np.abs(ours - made.reference(family, shape)).max() <= CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_and_threads_change_no_bit(family: str, made: Made) -> None:
    for shape in (1, 2):
        path, _ = made.folder(family, shape)
        together = vectors_of(NativeBackend(2), path)
        alone = np.concatenate([vectors_of(NativeBackend(1), path, [ids]) for ids in TEXTS])
        np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("family", sorted(OF_ONE_TYPE.keys() & ENCODERS.keys()))
def test_keys_that_pass_change_nothing_in_transformers(family: str, made: Made, tmp_path: Path) -> None:
    source, expected = made.folder(family, 0)
    odd = {key: True if values is ANY else values[0] for key, values in OF_ONE_TYPE[family].items() if values}
    config = json.loads((source / "config.json").read_text()) | odd
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("modules.json", "1_Pooling"):
        if (source / name).exists():
            (tmp_path / name).symlink_to(source / name)
    theirs = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert np.abs(_expected(theirs, family, 0, TEXTS[0]) - expected[0]).max() <= TOLERANCE
    assert np.abs(vectors_of(ReferenceBackend(), tmp_path) - expected).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "causal"),
        ("xlm-roberta", {"pad_token_id": 500}, "pad_token_id"),
        ("roberta", {"hidden_act": "mish"}, "hidden_act"),
        ("distilbert", {"n_heads": 7}, "heads"),
        ("modernbert", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters"),
        ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("modernbert", {"local_attention": 0}, "local_attention"),
        ("nomic_bert", {"moe_every_n_layers": 2}, "num_experts"),
        ("nomic_bert", {"prenorm": True}, "prenorm"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
        ("nomic_bert", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
        ("gemma3_text", {"modules.json": []}, "use_bidirectional_attention"),
        ("gemma3_text", {"modules.json": [{"type": "a.Dense", "path": "0_Dense"}]}, "dense layer"),
        ("gemma3_text", {"modules.json": [{"type": "a.LSTM", "path": "2_LSTM"}]}, "LSTM"),
    ],
)
def test_what_makes_another_model_is_refused_by_name(
    family: str, changes: dict[str, Any], name: str, made: Made, tmp_path: Path
) -> None:
    source, _ = made.folder(family, 0)
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    if "modules.json" in changes:
        (tmp_path / "modules.json").write_text(json.dumps(changes.pop("modules.json")))
    config = json.loads((source / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=name):
        describe(open_weights(tmp_path))
