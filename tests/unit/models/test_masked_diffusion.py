"""What describe makes of the metadata of diffusion models, good and strange."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.formats.weights import WeightSource
from kvarn.models.describe import describe
from kvarn.models.spec import MaskedDiffusion, ModelSpec
from tests.diffusion_models import tiny_diffusion
from tests.tiny_models import VOCAB
from tests.unit.models.edited import Edited

MASK_KEY = "tokenizer.ggml.mask_token_id"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WeightSource]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: open_weights(tiny_diffusion(arch, folder, "gguf")) for arch in ("llada", "dream", "sdar")}


def edited(source: WeightSource, metadata: dict[str, Any]) -> ModelSpec:
    return describe(Edited(source, metadata)).spec


def test_a_missing_mask_token_is_found_by_its_name(sources: dict[str, WeightSource]) -> None:
    tokens = [f"t{i}" for i in range(VOCAB)]
    tokens[77] = "<|mdm_mask|>"
    spec = edited(sources["llada"], {MASK_KEY: None, "tokenizer.ggml.tokens": tokens})
    assert spec.generation == MaskedDiffusion(77, shift=False, block=None)


def test_a_model_without_a_mask_token_is_refused(sources: dict[str, WeightSource]) -> None:
    with pytest.raises(FormatError, match="which token is the mask"):
        edited(sources["llada"], {MASK_KEY: None})


@pytest.mark.parametrize("value", [-1, VOCAB, True, "5", 2.0])
def test_a_mask_token_outside_the_vocabulary_is_refused(sources: dict[str, WeightSource], value: object) -> None:
    with pytest.raises(FormatError, match=f"{MASK_KEY} is"):
        edited(sources["llada"], {MASK_KEY: value})


def test_the_file_says_where_logits_are_found(sources: dict[str, WeightSource]) -> None:
    for arch, usual in (("llada", False), ("dream", True)):
        for said, expected in ((None, usual), (True, True), (False, False)):
            generation = edited(sources[arch], {"diffusion.shift_logits": said}).generation
            assert isinstance(generation, MaskedDiffusion)
            assert generation.shift is expected
    with pytest.raises(FormatError, match=r"diffusion\.shift_logits is 'yes'"):
        edited(sources["dream"], {"diffusion.shift_logits": "yes"})


@pytest.mark.parametrize(
    ("arch", "entry", "value"),
    [
        ("llada", "attention.causal", True),
        ("llada", "attention.sliding_window", 8),
        ("dream", "attention.causal", True),
    ],
)
def test_a_diffusion_model_that_sees_one_way_is_refused(
    sources: dict[str, WeightSource], arch: str, entry: str, value: object
) -> None:
    with pytest.raises(UnsupportedModel, match="a diffusion model with"):
        edited(sources[arch], {f"{arch}.{entry}": value})


def test_blocks_are_of_four_where_nothing_is_said(sources: dict[str, WeightSource]) -> None:
    spec = edited(sources["sdar"], {"sdar.diffusion.block_length": None})
    assert spec.blocks[0].attention.mask_block == 4


def test_blocks_that_would_waste_the_cache_are_refused(sources: dict[str, WeightSource]) -> None:
    with pytest.raises(FormatError, match=r"sdar\.diffusion\.block_length is 65521; expected a number from 1 to 256"):
        edited(sources["sdar"], {"sdar.diffusion.block_length": 65521})


@pytest.mark.parametrize("frequency", [2, 1.5, "1", [1, 0], {"1": 1}], ids=str)
def test_experts_in_some_layers_only_are_refused(frequency: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="moe_layer_freq"):
        describe(open_weights(tiny_diffusion("llada-moe", tmp_path, moe_layer_freq=frequency)))


def test_one_model_type_stands_for_dense_layers_and_experts(tmp_path: Path) -> None:
    path = tiny_diffusion("llada-moe", tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"model_type": "llada"}
    (path / "config.json").write_text(json.dumps(config))
    spec = describe(open_weights(path)).spec
    assert all(block.attention.qk_norm is not None for block in spec.blocks)


@pytest.mark.parametrize("entry", ["scale_logits", "alibi", "input_emb_norm", "include_bias"])
def test_config_entries_that_change_the_arithmetic_are_refused(entry: str, tmp_path: Path) -> None:
    path = tiny_diffusion("llada", tmp_path, **{entry: True})
    with pytest.raises(UnsupportedModel, match=entry):
        describe(open_weights(path))
