"""Keys that a config.json may have or leave out, in every family: a model that is not refused has transformers' logits.

Whatever a key does in a family (it is applied, it is ignored, it makes another model), nothing is misread silently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvarn.models.config.defaults import ROPES
from kvarn.models.config.encoder_families import ENCODERS
from kvarn.models.config.families import FAMILIES as KEYS
from kvarn.models.config.keys import ANY, OF_ONE_TYPE
from tests.conftest import Size
from tests.family_variants import ABSENT, Models, ours, theirs
from tests.parity.test_families import TOLERANCE
from tests.tiny_families import FAMILIES

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_dim")
WITHOUT_DEFAULT = ("gpt2", "gptj", "qwen2_vl", "qwen2_5_vl")  # no rope; classes that fail without these keys
WITH_ROPE = [family for family in FAMILIES if family not in WITHOUT_DEFAULT]
WINDOWS: list[dict[str, Any]] = [
    {"layer_types": "sliding", "sliding_window": 5},
    {"layer_types": "sliding", "sliding_window": 5, "use_sliding_window": False},
    {"layer_types": "sliding", "sliding_window": 5, "use_sliding_window": True},
    {"layer_types": "sliding", "sliding_window": None},
    {"layer_types": ABSENT, "sliding_window": 5, "use_sliding_window": True},
    {"layer_types": ABSENT, "sliding_window": 5, "use_sliding_window": False},
]
STRAY: list[dict[str, Any]] = [
    {"num_key_value_heads": 1},
    {"head_dim": 8},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"partial_rotary_factor": 0.5},
    {"rotary_pct": 0.5},
    {"rotary_dim": 4},
    {"rope_theta": 77.0},
    {"rope_local_base_freq": 77.0},
    {"hidden_act": "gelu"},
    {"hidden_activation": "gelu"},
    {"num_experts": 2},
    {"num_local_experts": 2},
    {"num_experts_per_tok": 1},
    {"norm_topk_prob": True},
    {"n_group": 2, "topk_group": 1},
    {"scoring_func": "softmax"},
    {"logit_scale": 3.0},
    {"final_logit_softcapping": 2.0},
    {"query_pre_attn_scalar": 3},
    {"max_position_embeddings": 64},
    {"original_max_position_embeddings": 16},
    {"rms_norm_eps": 0.1},
    {"layer_norm_eps": 0.1},
    {"tie_word_embeddings": True},
]


# What was misread once: tried in every run, of the rest a part of all in the short one.
ALWAYS: dict[str, list[dict[str, Any]]] = {
    "smollm3": WINDOWS[:2],
    "ministral3": WINDOWS[:1],
    "qwen3_vl": WINDOWS[2:3],
    "gpt_neox": [{"num_key_value_heads": 1}],
    "cohere": [{"rotary_pct": 0.5}],
    "starcoder2": [{"layer_norm_eps": 0.1}],
    "nemotron": [{"layer_norm_eps": 0.1}],
    "minimax_m2": [{"rotary_dim": 4}],
    "gpt_oss": [{"num_experts": 2}],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("stray"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_is_refused_or_has_the_meaning_that_transformers_gives_it(
    family: str, models: Models, size: Size
) -> None:
    misread, step = [], size(8, 1)
    for changes in (*ALWAYS.get(family, ()), *(*WINDOWS, *STRAY)[FAMILIES.index(family) % step :: step]):
        path = models.changed(family, changes)
        found = ours(path)
        if found is None:
            continue
        expected = theirs(path, family)
        if expected is None or not np.abs(found - expected).max() <= TOLERANCE:
            misread.append((changes, expected is None))
    assert misread == []


@pytest.mark.parametrize("family", WITH_ROPE)
def test_a_config_without_a_rope_has_that_of_its_class(family: str, models: Models) -> None:
    absent = models.changed(family, dict.fromkeys(ROPE_KEYS, ABSENT))
    expected = theirs(absent, family)
    found = ours(absent)
    assert expected is not None
    assert found is not None
    assert np.abs(found - expected).max() <= TOLERANCE
    if family in ROPES:  # null is no other than nothing
        nothing = ours(models.changed(family, dict.fromkeys(ROPE_KEYS, ABSENT) | {"rope_parameters": None}))
        assert nothing is not None
        assert np.array_equal(nothing, found)


@pytest.mark.parametrize("model_type", sorted(OF_ONE_TYPE.keys() & set(FAMILIES) - ENCODERS.keys()))
def test_what_passes_for_one_model_type_changes_nothing_in_transformers(model_type: str, models: Models) -> None:
    plain = theirs(models.changed(model_type, {}), model_type)
    assert plain is not None
    for key, values in OF_ONE_TYPE[model_type].items():
        assert key not in KEYS[model_type]
        for value in (7, "odd") if values is ANY else values:
            path = models.changed(model_type, {key: value})
            changed, found = theirs(path, model_type), ours(path)
            assert changed is not None, (key, value)
            assert np.array_equal(changed, plain), (key, value)
            assert found is not None, (key, value)
            assert np.abs(found - plain).max() <= TOLERANCE
