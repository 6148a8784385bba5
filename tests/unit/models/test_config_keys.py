"""Keys of config.json: which of them are read, refused by name or let pass; and the context of LongRoPE."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.formats.weights import WeightSource
from kvarn.models.config.families import FAMILIES
from kvarn.models.config.keys import changes_arithmetic
from kvarn.models.describe import describe
from kvarn.models.registry import ARCHITECTURES
from kvarn.models.spec import Head
from tests.diffusion_models import tiny_diffusion
from tests.tiny_models import ORIGINAL_CONTEXT, tiny_model
from tests.unit.models.edited import Edited, edited_config

HUGE = 10**400


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    return open_weights(tiny_model("llama", tmp_path_factory.mktemp("llama")))


def test_every_model_type_has_its_keys() -> None:
    assert {name for entry in ARCHITECTURES for name in entry.hf} == FAMILIES.keys()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("residual_multiplier", 0.22),
        ("use_qk_layernorm", True),
        ("attention_sink_size", 4),
        ("final_norm_eps", 1e-3),
        ("query_scale", 0.5),
        ("first_k_dense_layers", 3),
        ("sliding_window", 4096),
        ("partial_rotary_factor", 0.25),
        ("rope", False),
        ("use_rope", False),
        ("num_kv_shared_layers", 1),
        ("causal", False),
        ("scale_attn_weights", False),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_a_key_that_may_change_the_arithmetic_is_refused_by_name(key: str, value: Any, llama: WeightSource) -> None:
    with pytest.raises(UnsupportedModel, match=rf"the model is changed by {key} = ") as error:
        describe(edited_config(llama, **{key: value}))
    assert error.value.fields == (key,)


def test_a_decoder_that_sees_both_ways_is_refused(llama: WeightSource) -> None:
    with pytest.raises(UnsupportedModel, match="is_causal is false"):
        describe(edited_config(llama, is_causal=False))
    assert describe(edited_config(llama, is_causal=True)).spec == describe(llama).spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("residual_multiplier", 1.0),
        ("use_qk_layernorm", False),
        ("attention_sink_size", 0),
        ("partial_rotary_factor", 1),
        ("attention_probs_dropout_prob", 0.1),
        ("router_z_loss_coef", 0.001),
        ("pad_token_id", 7),
        ("_attn_implementation_autoset", True),
        ("use_flash_attention_2", True),
        ("kv_cache_dtype", "fp8"),
        ("transformers.js_config", {"dtype": "q4"}),
        ("is_llama_config", True),
        ("unsloth_fixed", True),
        ("auto_map", {"AutoModel": "modeling.Model"}),
        ("sliding_window_size", 4096),
    ],
)
def test_other_keys_pass(key: str, value: Any, llama: WeightSource) -> None:
    assert describe(edited_config(llama, **{key: value})).spec == describe(llama).spec
    assert not changes_arithmetic(key, value)


@pytest.mark.parametrize("key", ["num_hidden_layers", "rope_theta", "rms_norm_eps", "hidden_size", "head_dim"])
def test_a_number_of_400_digits_is_refused_and_not_an_error_of_ours(key: str, llama: WeightSource) -> None:
    with pytest.raises(FormatError, match=f"{key} is 1000"):
        describe(edited_config(llama, **{key: HUGE}))


def test_factors_of_400_digits_are_refused_too(tmp_path: Path) -> None:
    source = open_weights(tiny_model("phi3-longrope", tmp_path))
    scaling = source.metadata["hf"]["rope_scaling"]
    with pytest.raises(FormatError, match="short_factor"):
        describe(edited_config(source, rope_scaling=scaling | {"short_factor": [HUGE] * 8}))


def test_a_missing_output_matrix_is_not_made_up(llama: WeightSource) -> None:
    without = Edited(llama, shapes={"lm_head.weight": None})
    with pytest.raises(FormatError, match=r"\(lm_head\.weight\) is missing, and tie_word_embeddings is false"):
        describe(without)
    tied = edited_config(without, tie_word_embeddings=True)
    assert describe(tied).spec.head == Head(tied=True)


@pytest.mark.parametrize("key", ["block_length", "bd_size"])
def test_a_dream_with_blocks_of_another_name_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key} = 32"):
        describe(open_weights(tiny_diffusion("dream", tmp_path, **{key: 32})))


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_longrope_is_served_with_its_original_context_unless_more_is_asked_for(format: Any, tmp_path: Path) -> None:
    source = open_weights(tiny_model("phi3-longrope", tmp_path, format))
    usual, short, long = (describe(source, context) for context in (None, ORIGINAL_CONTEXT, ORIGINAL_CONTEXT + 1))
    assert usual.spec == short.spec
    assert usual.spec.context_length == ORIGINAL_CONTEXT
    assert long.spec.context_length == 128
    ropes = [described.spec.blocks[0].attention.rope for described in (usual, long)]
    assert ropes[0] != ropes[1]
    assert [len(described.notes) for described in (usual, short, long)] == [1, 1, 1]
    assert f"up to {ORIGINAL_CONTEXT} tokens" in usual.notes[0]
    assert "long factors for every text" in long.notes[0]


@pytest.mark.parametrize("extra", [{"mscale_extra": 2.0}, {"short_factor": [1.0]}])
def test_rope_entries_that_a_scaling_does_not_have_are_refused_by_name(extra: Any, llama: WeightSource) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, **extra}
    with pytest.raises(UnsupportedModel, match=f"rope scaling 'yarn' is changed by {next(iter(extra))} ="):
        describe(edited_config(llama, rope_scaling=scaling))


YARN_GGUF = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}
USUAL = 0.1 * math.log(4.0) + 1.0


@pytest.mark.parametrize(
    ("facts", "magnitude", "num_notes"),
    [
        ({}, 1.0, 0),
        ({"scaling.attn_factor": 0.8}, 0.8, 0),
        ({"scaling.type": "linear", "scaling.factor": 4.0, "scaling.attn_factor": 0.8}, 0.8, 0),
        (YARN_GGUF, USUAL, 0),
        (YARN_GGUF | {"scaling.attn_factor": 0.8}, 0.8 * USUAL, 0),
        (YARN_GGUF | {"scaling.yarn_attn_factor": 0.8}, USUAL, 1),
        (YARN_GGUF | {"scaling.yarn_attn_factor": 1.0, "scaling.yarn_ext_factor": 1.0}, USUAL, 0),
    ],
)
def test_gguf_attn_factor_multiplies_and_yarn_attn_factor_does_nothing_as_in_llama_cpp(
    facts: dict[str, Any], magnitude: float, num_notes: int, tmp_path: Path
) -> None:
    source = open_weights(tiny_model("llama", tmp_path, "gguf"))
    described = describe(Edited(source, {f"llama.rope.{key}": value for key, value in facts.items()}))
    assert described.spec.blocks[0].attention.rope.magnitude == pytest.approx(magnitude, rel=1e-12)
    assert len(described.notes) == num_notes


def test_gguf_attn_factor_holds_for_every_layer_and_is_the_whole_magnitude_of_longrope(tmp_path: Path) -> None:
    gemma = open_weights(tiny_model("gemma3", tmp_path, "gguf"))
    scaled = describe(Edited(gemma, {"gemma3.rope.scaling.attn_factor": 0.8})).spec
    assert {block.attention.rope.magnitude for block in scaled.blocks} == {0.8}
    phi = open_weights(tiny_model("phi3-longrope", tmp_path, "gguf"))
    key = "phi3.rope.scaling.attn_factor"
    magnitudes = [describe(Edited(phi, {key: given})).spec.blocks[0].attention.rope.magnitude for given in (1.25, None)]
    assert magnitudes == [1.25, 1.0]


def test_yarn_entries_that_transformers_ignores_are_noted(llama: WeightSource) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    plain = describe(edited_config(llama, rope_scaling=scaling))
    noted = describe(edited_config(llama, rope_scaling=scaling | {"attn_factor": 0.5}))
    assert noted.spec == plain.spec
    assert [note for note in noted.notes if "attn_factor = 0.5 has no effect" in note]


def test_a_copy_of_the_embedding_is_no_head_of_its_own(tmp_path: Path) -> None:
    path = tiny_model("llama-tied", tmp_path)
    tied = describe(open_weights(path)).spec
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, path / "model.safetensors")
    assert describe(open_weights(path)).spec == tied
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, path / "model.safetensors")
    with pytest.raises(FormatError, match=r"lm_head\.weight is not a copy of the embedding"):
        describe(open_weights(path))
