"""Odd but possible configurations: what describe accepts has the logits of transformers, the rest is refused by name.

A row is an architecture of tests/tiny_models.py with changed keys of its config.json; None removes a key, NULL is null.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.errors import ModelError
from kvarn.formats.open import open_weights
from kvarn.models.config.families import FAMILIES
from kvarn.models.describe import describe
from tests.parity.test_reference_transformers import IDS, TOLERANCE, reference_of, transformers_output
from tests.running import all_logits
from tests.tiny_models import LLAMA3_ROPE, LONG_ROPE, YARN_ROPE, tiny_model

transformers = pytest.importorskip("transformers")


class _Absent:
    """A key that is taken out."""

    def __repr__(self) -> str:
        return "absent"


NULL = _Absent()
# The embedding says how large the vocabulary is; a list has an entry for each of the class's layers; by name only.
NOT_VALUES = (
    *("vocab_size", "layer_types", "mlp_layer_types", "full_attn_idxs", "no_rope_layers", "is_causal"),
    *("activation_sparsity_pattern", "per_layer_config", "moe_layer_end_index", "ffn_hidden_size", "num_kv_heads"),
    *("quantization_config", "layers_block_type", "mtp_layers_block_type", "hybrid_override_pattern", "mamba_d_head"),
    *("moe_layers", "attention_layers"),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LONG = LONG_ROPE | {"rope_type": "longrope"}
SAME: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": None}),
    ("llama", {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 3}, "rope_parameters": {"rope_type": "default"}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
    ("llama", {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 64}),
    ("llama", {"rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if not k.startswith("orig")}}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("llama", {"is_causal": True}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"hidden_act": "gelu_new"}),
    ("llama", {"hidden_act": "swish"}),
    ("llama", {"hidden_activation": "silu"}),
    ("llama", {"attention_dropout": 0.5, "initializer_range": 0.9, "pretraining_tp": 4, "use_cache": False}),
    ("llama", {"_attn_implementation": "sdpa", "torch_dtype": "bfloat16", "unsloth_version": "2026.1"}),
    ("llama", {"layer_types": ["full_attention"] * 2}),
    ("llama", {"rms_norm_eps": 0.01}),
    ("llama", {"num_key_value_heads": 2, "head_dim": NULL}),
    ("llama-tied", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": NULL}),
    ("mistral", {"sliding_window": 3}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {"sliding_window": 5}),
    ("mixtral", {"rope_theta": None}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("mixtral", {"router_jitter_noise": 0.3, "output_router_logits": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4}),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": NULL, "max_window_layers": 0}),
    ("qwen2", {"rope_scaling": YARN}),
    ("qwen2", {"rope_scaling": YARN | {"truncate": False}}),
    ("qwen2", {"rope_scaling": YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0}}),
    ("qwen2", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4}}),
    ("qwen2", {"rope_scaling": YARN | {"mscale": 0.7}}),
    ("qwen2", {"rope_scaling": YARN | {"attention_factor": 0.8, "mscale": 0.7, "mscale_all_dim": 1.4}}),
    ("qwen2", {"rope_scaling": YARN | {"attn_factor": 0.8}}),
    ("qwen2", {"rope_scaling": YARN | {"attn_factor": 0.8, "attention_factor": 1.3, "extrapolation_factor": 2.0}}),
    ("llama", {"rope_scaling": YARN | {"attention_factor": 0.8}}),
    ("qwen2", {"rope_scaling": YARN | {"factor": 0.5}}),
    ("qwen2", {"rope_scaling": YARN | {"original_max_position_embeddings": 4}}),
    ("qwen2", {"rope_scaling": YARN | {"original_max_position_embeddings": 100000}}),
    ("qwen2", {"rope_scaling": {k: v for k, v in YARN_ROPE.items() if not k.startswith("orig")}}),
    ("qwen2", {"rope_scaling": YARN, "original_max_position_embeddings": 32}),
    ("qwen2", {"attention_bias": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ("qwen3moe", {"use_sliding_window": True, "sliding_window": 4}),
    ("qwen3moe", {"norm_topk_prob": False}),
    ("qwen3moe", {"norm_topk_prob": None}),
    ("qwen3moe", {"router_aux_loss_coef": 5.0}),
    ("gemma2", {"attn_logit_softcapping": NULL}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": NULL}),
    ("gemma2", {"query_pre_attn_scalar": None}),
    ("gemma2", {"query_pre_attn_scalar": 100}),
    ("gemma2", {"hidden_activation": None, "hidden_act": "gelu"}),
    ("gemma2", {"hidden_activation": "silu"}),
    ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("gemma2", {"sliding_window": None}),
    ("gemma2", {"tie_word_embeddings": None}),
    ("gemma3", {"final_logit_softcapping": 2.0}),
    ("gemma3", {"sliding_window_pattern": 2}),
    ("gemma3", {"rope_local_base_freq": None, "rope_theta": None}),
    ("gemma3", {"rope_scaling": YARN}),
    ("gemma3", {"query_pre_attn_scalar": None}),
    (
        "gemma3",
        {
            "rope_scaling": None,
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default"},
            },
        },
    ),
    ("llama", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1, "is_decoder": True}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("phi3", {"sliding_window": NULL}),
    ("phi3", {"rope_theta": 77.0}),
    ("phi3-longrope", {"rope_scaling": LONG | {"factor": 3.0}}),
    ("phi3-longrope", {"rope_scaling": LONG | {"attention_factor": 1.7}}),
    ("phi3-longrope", {"rope_scaling": LONG | {"type": "yarn", "rope_type": "yarn"}}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": LLAMA3_ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"sliding_window": 4}, "sliding_window"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("llama", {"attention_bias": True}, "attn_q.bias is missing"),
    ("llama", {"mlp_bias": True}, "ffn_gate.bias"),
    ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ("llama", {"residual_multiplier": 0.2}, "residual_multiplier"),
    ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ("llama", {"logits_scaling": 8.0}, "logits_scaling"),
    ("llama", {"use_post_norm": True}, "use_post_norm"),
    ("llama", {"attention_chunk_size": 8}, "attention_chunk_size"),
    ("llama", {"block_size": 4}, "block_size"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "yarn_extra": 3}}, "yarn_extra"),
    ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 4.0}}, "alpha"),
    ("llama", {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "'proportional' is unknown"),
    ("llama", {"is_causal": False}, "is_causal"),
    ("qwen2", {"is_causal": False}, "is_causal"),
    ("gemma3", {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_parameters"),
    ("llama", {"tie_word_embeddings": False, "lm_head.weight": None}, "lm_head.weight"),
    ("llama", {"tie_word_embeddings": None, "lm_head.weight": None}, "lm_head.weight"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ("qwen3moe", {"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size"),
    ("gemma2", {"tie_word_embeddings": False}, "lm_head.weight"),
    ("qwen2", {"tie_word_embeddings": True}, "lm_head.weight is not a copy"),
    ("mixtral", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}}, "full_attention"),
    ("gemma3", {"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
    ("gemma3", {"attention_bias": True}, "attention_bias"),
    ("qwen3moe", {"num_local_experts": 7}, "num_experts"),
    ("phi3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
]


def variant(arch: str, changes: dict[str, Any], folder: Path) -> Path:
    """Write a tiny model with a changed config.json; a change called *.weight is of a tensor."""
    path = tiny_model(arch, folder)
    config = json.loads((path / "config.json").read_text()) | changes
    written = {key: None if value is NULL else value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps({k: v for k, v in written.items() if not k.endswith(".weight")}))
    tensors = {name: value for name, value in load_file(path / "model.safetensors").items() if name not in changes}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(("arch", "changes"), SAME, ids=lambda value: str(value)[:60])
def test_an_accepted_variant_has_the_logits_of_transformers(arch: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = variant(arch, changes, tmp_path)
    backend, table = reference_of(path, context=len(IDS))
    logits = all_logits(backend, table, IDS, (len(IDS),))
    assert np.abs(logits - transformers_output(path, IDS)).max() <= TOLERANCE


@pytest.mark.parametrize(("arch", "changes", "name"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_variant_that_is_another_model_is_refused_by_name(
    arch: str, changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        describe(open_weights(variant(arch, changes, tmp_path)))


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() & {*transformers.CONFIG_MAPPING}))
def test_what_a_config_leaves_out_has_the_value_that_transformers_gives_it(model_type: str) -> None:
    theirs = transformers.CONFIG_MAPPING[model_type]()
    theirs = getattr(theirs, "text_config", None) or theirs
    theirs.allow_global_per_layer_attribute_access = True  # of layers that differ
    num_heads = getattr(theirs, "num_attention_heads", 1)
    derived: dict[str, Any] = {"head_dim": theirs.hidden_size // num_heads}
    derived |= {"num_key_value_heads": num_heads, "v_head_dim": derived["head_dim"]}
    derived |= {"attention_multiplier": derived["head_dim"] ** -0.5, "word_embed_proj_dim": theirs.hidden_size}
    derived |= {"time_step_rank": -(-theirs.hidden_size // 16), "mlp_multipliers": [1.0] * 2}
    derived |= {"ssm_multipliers": [1.0] * 5, "intermediate_size": getattr(theirs, "expand", 0) * theirs.hidden_size}
    for key, value in FAMILIES[model_type].items():
        if not hasattr(theirs, key) or key.startswith(("rope", "sliding_window_p")) or key in NOT_VALUES:
            continue
        usual = getattr(theirs, key)
        usual = usual[0] if key == "intermediate_size" and isinstance(usual, list) else usual  # the same for all layers
        turned_off = key == "sliding_window" and not usual and not getattr(theirs, "use_sliding_window", True)
        is_derived = value is None and usual == derived.get(key)
        aliases = {*theirs.attribute_map.items(), *((b, a) for a, b in theirs.attribute_map.items())}
        is_alias = value is None and any(FAMILIES[model_type].get(b) == usual for a, b in aliases if a == key)
        assert (usual or None) == (value or None) or turned_off or is_derived or is_alias, key


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("llama", ("max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act", "tie_word_embeddings")),
        ("mistral", ("max_position_embeddings", "rms_norm_eps")),
        ("mixtral", ("max_position_embeddings", "num_experts_per_tok", "rope_theta")),
        ("qwen2", ("max_position_embeddings", "rms_norm_eps")),
        ("qwen3moe", ("max_position_embeddings", "rms_norm_eps", "norm_topk_prob")),
        ("gemma2", ("max_position_embeddings", "rms_norm_eps", "hidden_activation")),
        ("gemma3", ("max_position_embeddings", "rms_norm_eps", "rope_local_base_freq")),
        ("phi3", ("max_position_embeddings", "rms_norm_eps")),
    ],
)
def test_a_model_runs_without_the_keys_that_its_class_has_values_for(
    arch: str, keys: tuple[str, ...], tmp_path: Path
) -> None:
    path = variant(arch, dict.fromkeys(keys), tmp_path)
    assert not json.loads((path / "config.json").read_text()).keys() & {*keys}
    backend, table = reference_of(path, context=len(IDS))
    logits = all_logits(backend, table, IDS, (len(IDS),))
    assert np.abs(logits - transformers_output(path, IDS)).max() <= TOLERANCE


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() & {*transformers.CONFIG_MAPPING} - {"gemma3"}))
def test_no_key_that_transformers_writes_is_taken_for_a_stranger(model_type: str, tmp_path: Path) -> None:
    from kvarn.models.config.keys import changes_arithmetic

    transformers.CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    known = FAMILIES[model_type].keys()
    assert not [key for key, value in written.items() if key not in known and changes_arithmetic(key, value)]
