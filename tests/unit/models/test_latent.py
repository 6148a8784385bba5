"""Models with latent attention: what their cache holds of a token, and what is said where they are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvarn.backends.batch import KVLayout
from kvarn.errors import ConfigError, ModelError, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.memory_plan import kv_token_bytes
from kvarn.models.spec import LatentAttention, ModelSpec
from tests.running import layout_of

families = pytest.importorskip("tests.tiny_families")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = families.family_folder("deepseek_v3", 0, tmp_path_factory.mktemp("latent"))[1]
    return path


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return describe(open_weights(folder)).spec


@pytest.mark.parametrize(("dtype", "size"), [("f16", 2), ("f32", 4)])
def test_a_token_takes_one_row_of_rank_and_rope_dims_in_every_layer(spec: ModelSpec, dtype: str, size: int) -> None:
    layer = spec.blocks[0].mixer
    assert isinstance(layer, LatentAttention)
    row_bytes = (layer.rank + layer.rope_dim) * size
    assert layout_of(spec, dtype).token_bytes == kv_token_bytes(spec, dtype) == len(spec.blocks) * row_bytes


def test_a_cache_of_eight_bits_is_refused_with_those_that_work(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="latent attention, whose cache is f16 or f32"):
        layout_of(spec, "q8_0")
    assert KVLayout(16, ((2, 8),), "q8_0").value_dims == (8,)


def test_what_needs_plain_attention_says_what_the_model_has(spec: ModelSpec) -> None:
    with pytest.raises(UnsupportedModel, match="the model has latent attention"):
        _ = spec.blocks[0].attention


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_key_value_heads": 1}, "KV heads"),
        ({"attention_bias": True}, "attention_bias"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"qk_head_dim": 7}, "qk_head_dim"),
        ({"n_group": 3}, "n_group"),
    ],
)
def test_a_config_of_another_model_is_refused_by_name(
    changes: dict[str, object], name: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=name):
        describe(open_weights(changed(folder, changes, tmp_path)))


def test_kimi_k2_is_the_same_by_another_name(folder: Path, spec: ModelSpec, tmp_path: Path) -> None:
    found = describe(open_weights(changed(folder, {"model_type": "kimi_k2"}, tmp_path))).spec
    assert replace(found, architecture=spec.architecture, name=spec.name) == spec


def changed(folder: Path, changes: dict[str, object], target: Path) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target
