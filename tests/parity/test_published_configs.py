"""Keys that published folders of some families have beside those that transformers reads: known, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from tests.family_gguf import family_gguf
from tests.parity.test_families import IDS, TOLERANCE, logits_of
from tests.tiny_families import VARIANTS, family_config, family_folder, randomise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PUBLISHED: dict[str, dict[str, Any]] = {
    "starcoder2": {"norm_type": "layer_norm", "mlp_type": "default", "activation_function": "gelu"},
    "cohere2": {
        "position_embedding_type": "rope_gptj",
        "order_of_interleaved_layers": "local_attn_first",
        "layer_switch": 4,
        "use_embedding_sharing": True,
        "use_parallel_block": True,
        "use_gated_activation": True,
    },
    "hunyuan_v1_dense": {"norm_type": "rms", "use_rotary_pos_emb": True, "num_experts": 1, "use_cla": False},
    "gpt_oss": {"experts_per_token": 4, "initial_context_length": 4096},
    "glm4_moe": {"num_nextn_predict_layers": 1},
    "gemma4_text": {"use_bidirectional_attention": "vision"},
    "deepseek_v2": {
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "seq_aux": True,
    },
    "deepseek_v3": {"ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    | {"num_nextn_predict_layers": 1, "seq_aux": True, "pretraining_tp": 1},
    "glm4_moe_lite": {"topk_method": "noaux_tc", "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1}
    | {"first_k_dense_replace": 1},
    "minicpm3": {"pretraining_tp": 1},
    "smollm3": {"max_window_layers": 28, "pretraining_tp": 2, "mlp_bias": False},
}
_SUMMARY = {"summary_activation": None, "summary_proj_to_logits": True, "summary_type": "cls_index"}
PUBLISHED |= {
    "gpt2": _SUMMARY | {"n_ctx": 1024, "embd_pdrop": 0.1},
    "gpt_neo": _SUMMARY | {"gradient_checkpointing": False, "resid_dropout": 0, "embed_dropout": 0},
    "gptj": _SUMMARY | {"rotary": True, "scale_attn_weights": True, "gradient_checkpointing": False},
    "gpt_bigcode": _SUMMARY
    | {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True, "pre_allocate_kv_cache": False}
    | {"inference_runner": 0, "validate_runner_input": True, "max_sequence_length": None},
    "bloom": {"attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True}
    | {
        "offset_alibi": 100,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "slow_but_exact": False,
        "n_inner": None,
    },
    "afmoe": {"route_norm": True, "score_func": "sigmoid", "n_group": 1, "topk_group": 1, "load_balance_coeff": 1e-3},
    "exaone_moe": {"num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "hy_v3": {"route_norm": True, "qk_norm": True, "moe_router_use_sigmoid": True, "first_k_dense_replace": 1}
    | {"moe_router_enable_expert_bias": True, "expert_hidden_dim": 24, "enable_lm_head_fp32": True}
    | {"num_nextn_predict_layers": 1, "enable_attention_fp32_softmax": False},
    "opt": {"_remove_final_layer_norm": False, "layerdrop": 0.0, "activation_dropout": 0.0, "init_std": 0.02},
}
REFUSED: list[tuple[str, str, Any]] = [
    ("llama4_text", "attention_chunk_size", None),
    ("phimoe", "num_experts_per_tok", 1),
    ("qwen3_5_text", "hidden_act", "gelu"),
    ("starcoder2", "norm_type", "rms_norm"),
    ("cohere2", "use_parallel_block", False),
    ("cohere2", "use_gated_activation", False),
    ("hunyuan_v1_dense", "use_cla", True),
    ("hunyuan_v1_dense", "num_experts", 8),
    ("gpt_oss", "swiglu_limit", 5.0),
    ("granite", "norm_type", "rms"),
    ("gemma4_text", "use_bidirectional_attention", "all"),
    ("gemma4_unified_text", "use_bidirectional_attention", "all"),
    ("gemma4_text", "per_layer_config", {"1": {"num_attention_heads": 2}}),
    ("deepseek_v2", "norm_topk_prob", True),
    ("deepseek_v2", "topk_method", "noaux_tc"),
    ("deepseek_v3", "moe_layer_freq", 2),
    ("bloom", "apply_residual_connection_post_layernorm", True),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("opt", "do_layer_norm_before", False),
    ("opt", "layer_norm_elementwise_affine", False),
    ("opt", "word_embed_proj_dim", 32),
    ("gptj", "rotary", False),
    ("lfm3", "layer_types", ["conv", "full_attention", "chunked_attention", "conv"]),
    ("lfm3", "conv_bias", True),
    ("hy_v3", "mlp_bias", True),
    ("hy_v3", "route_norm", False),
    ("hy_v3", "moe_router_use_sigmoid", False),
    ("afmoe", "score_func", "softmax"),
    ("afmoe", "n_group", 2),
    ("exaone_moe", "scoring_func", "softmax"),
]


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_published_files_say_is_known(family: str, tmp_path: Path) -> None:
    _, folder = family_folder(family, 0, tmp_path)
    plain = describe(open_weights(folder)).spec
    assert describe(open_weights(_with(folder, PUBLISHED[family]))).spec == plain


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_another_value_is_refused_by_name(family: str, key: str, value: object, tmp_path: Path) -> None:
    _, folder = family_folder(family, 0, tmp_path)
    with pytest.raises(UnsupportedModel, match=key):
        describe(open_weights(_with(folder, {key: value})))


def test_the_old_spelling_of_a_partial_rotation_is_read(tmp_path: Path) -> None:
    _, folder = family_folder("gpt_neox", 1, tmp_path)
    plain = describe(open_weights(folder)).spec
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    old = {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config | old))
    assert describe(open_weights(folder)).spec == plain


@pytest.mark.parametrize(
    "types", [[[["local"], 3]], [[["local", "sparse"], 2]], [["local", 4]], "local", [[["local"], 9**9]]]
)
def test_kinds_of_layers_that_are_too_few_or_unknown_are_told(types: object, tmp_path: Path) -> None:
    _, folder = family_folder("gpt_neo", 0, tmp_path)
    with pytest.raises(FormatError, match="attention_types"):
        describe(open_weights(_with(folder, {"attention_types": types})))


def test_a_rotation_wider_than_a_head_is_told(tmp_path: Path) -> None:
    _, folder = family_folder("gptj", 0, tmp_path)
    with pytest.raises(FormatError, match="rotary_dim is 18; expected an even number up to 16"):
        describe(open_weights(_with(folder, {"rotary_dim": 18})))


def test_a_missing_or_misshapen_tensor_of_an_expert_is_told(tmp_path: Path) -> None:
    _, folder = family_folder("gpt_oss", 0, tmp_path)
    with pytest.raises(FormatError, match=r"attn_sinks|expected"):
        describe(open_weights(_with(folder, {"num_attention_heads": 8, "num_key_value_heads": 4})))
    with pytest.raises(FormatError, match=r"ffn_gate_inp.* expected \(6, 64\)"):
        describe(
            open_weights(_with(folder, {"num_local_experts": 6, "num_attention_heads": 4, "num_key_value_heads": 2}))
        )


def test_drafting_layers_are_left_out_of_both_formats(tmp_path: Path) -> None:
    """GGUF counts them among its blocks, config.json does not."""
    _, folder = family_folder("glm4_moe", 0, tmp_path)
    plain = describe(open_weights(folder)).spec
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    tensors["model.layers.4.input_layernorm.weight"] = np.zeros(64, np.float32)
    save_file(tensors, folder / "model.safetensors")
    described = describe(open_weights(folder))
    assert described.spec.blocks == plain.blocks
    assert described.draft is None  # most of its tensors are not there
    del tensors["model.layers.4.eh_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    described = describe(open_weights(family_gguf(folder)))
    assert len(described.spec.blocks) == len(plain.blocks)
    assert "blk.4.attn_norm.weight" not in described.weights.tensors


def _with(folder: Path, entries: dict[str, Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text", "gemma4_unified_text", "llama4_text"])
def test_the_text_part_is_read_beside_towers_for_images_and_sounds(family: str, tmp_path: Path) -> None:
    _, folder = family_folder(family, 0, tmp_path)
    plain = describe(open_weights(folder))
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": family.removesuffix("_text"), "vision_config": {"hidden_size": 8}, "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
    names = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_model", "multi_modal_projector")
    towers = {f"model.{name}.layer.weight" for name in names}
    save_file(nested | dict.fromkeys(towers, np.zeros((2, 2), np.float32)), folder / "model.safetensors")
    found = describe(open_weights(folder))
    assert found.spec == plain.spec
    assert found.weights.tensors == plain.weights.tensors
    assert any("they are not read" in note for note in found.notes)
    del config["model_type"]  # the whole names its own only
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": config}))
    assert describe(open_weights(folder)).spec == plain.spec


def test_experts_that_are_stored_turned_are_turned_back(tmp_path: Path) -> None:
    """As in the published folders of Qwen3-VL with experts; transformers writes them the other way."""
    _, folder = family_folder("qwen3_vl_moe", 0, tmp_path)
    straight = describe(open_weights(folder)).weights
    tensors = load_file(folder / "model.safetensors")
    turned = {
        name: np.ascontiguousarray(values.swapaxes(1, 2)) if ".experts." in name else values
        for name, values in tensors.items()
    }
    expected = {name: straight.array(name) for name in straight.tensors if "_exps" in name}
    save_file(turned, folder / "model.safetensors")
    found = describe(open_weights(folder)).weights
    assert expected
    for name, values in expected.items():
        np.testing.assert_array_equal(found.array(name), values)


TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": ("ministral3", {"vision_config": TOWER | {"model_type": "pixtral", "image_size": 16, "head_dim": 16}}),
    "internvl": ("qwen3", {"vision_config": TOWER | {"model_type": "internvl_vision", "image_size": [16, 16]}}),
    "smolvlm": ("llama", {"vision_config": TOWER | {"model_type": "smolvlm_vision", "image_size": 16}}),
    "lfm2_vl": ("lfm2", {"vision_config": TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16}}),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_the_text_of_a_model_that_sees_has_the_logits_of_transformers(wrapper: str, tmp_path: Path) -> None:
    text_type, parts = WRAPPED[wrapper]
    text = family_config(text_type, 0) if text_type in VARIANTS else family_config("smollm3", 0) | {"head_dim": 16}
    text.pop("no_rope_layer_interval", None)
    tokens = {"image_token_id": 119, "image_token_index": 119, "image_seq_length": 1}
    config = transformers.AutoConfig.for_model(
        wrapper, text_config=text | {"model_type": text_type}, tie_word_embeddings=True, **parts, **tokens
    )
    config._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed=5)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(logits_of(ReferenceBackend(), tmp_path) - expected).max() <= TOLERANCE
