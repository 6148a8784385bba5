"""A folder of transformers as a GGUF file: names of the `gguf` package, metadata as llama.cpp's converter has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.tiny_gguf import GGUF_KEYS, Tensors, stack_experts, unrotated

ARCHITECTURES = {
    "olmo3": "olmo2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "cohere": "command-r",
    "phi": "phi2",
    "ministral3": "mistral3",
    "qwen2_moe": "qwen2moe",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
}
PERMUTED = ("smollm3", "granite", "ministral3", "arcee")  # Q and K, for the rotation of neighbours
# What GGUF cannot say, or the converter does not.
WITHOUT_GGUF = {
    ("gemma", 1): "the base of its rope is not written",
    ("starcoder2", 1): "its window is not written",
    ("cohere2", 2): "which layers have windows is not written",
    ("gpt2", 2): "its activation is not written",
    ("qwen2_moe", 1): "norm_topk_prob is not written",
    ("qwen2_moe", 2): "dense layers among those with experts have no names",
    **{("ministral", shape): "no architecture" for shape in range(3)},
}
KEYS = GGUF_KEYS | {
    "norm_epsilon": "attention.layer_norm_epsilon",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
UNWRITTEN = {"starcoder2": ("sliding_window",), "gemma": ("rope_theta",)}


def family_gguf(folder: Path, type: TensorType = TensorType.F32) -> Path:
    """Write the GGUF file beside the folder."""
    config = json.loads((folder / "config.json").read_text())
    arch = gguf_architecture(config["model_type"])
    config |= config.get("text_config", {})
    texts = {name: values for name, values in load_file(folder / "model.safetensors").items() if "visual" not in name}
    tensors = _gguf_tensors(config, texts, arch)
    stored = {name: Stored.quantized(values, _type_of(name, values, type)) for name, values in tensors.items()}
    path = folder.with_suffix(".gguf")
    metadata = {f"{arch}.{key}": value for key, value in gguf_facts(config).items()}
    write_gguf(path, {"general.architecture": arch, "general.name": folder.name} | metadata, stored)
    return path


def gguf_architecture(model_type: str) -> str:
    return ARCHITECTURES.get(model_type, model_type)


def gguf_facts(c: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a config.json, without the prefix."""
    family, rope = c["model_type"], _full_rope(c)
    unwritten = UNWRITTEN.get(family, ())
    facts = {key: c[name] for name, key in KEYS.items() if c.get(name) is not None and name not in unwritten}
    if "head_dim" in c and family != "granite":
        facts |= {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
    if "rope_theta" in rope and "rope_theta" not in unwritten:
        facts["rope.freq_base"] = _rope_base(c, rope)
    if family != "gpt2":
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        facts["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type") == "yarn":
        facts |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        facts["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if c.get("sliding_window") and "sliding_window" not in unwritten and c.get("layer_types"):
        facts["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in c["layer_types"]]
    if family == "gpt2":
        facts["feed_forward_length"] = 4 * c["n_embd"]
    if family == "glm4_moe":
        facts |= {"expert_gating_func": 2, "expert_weights_norm": c["norm_topk_prob"], "nextn_predict_layers": 1}
        facts["block_count"] += 1
    if family == "gpt_oss":
        facts |= {
            "expert_feed_forward_length": c["intermediate_size"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        }
        del facts["attention.sliding_window_pattern"]
    if family == "minimax_m2":
        facts |= {"expert_feed_forward_length": c["intermediate_size"], "expert_gating_func": 2}
    if family == "ministral3":
        facts |= {"attention.temperature_scale": rope["llama_4_scaling_beta"]}
        facts["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    return facts


def _full_rope(c: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = c.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def _rope_base(c: dict[str, Any], rope: dict[str, Any]) -> float:
    stretch = rope.get("alpha", 1.0) ** (c["head_dim"] / (c["head_dim"] - 2)) if "alpha" in rope else 1.0
    return float(rope["rope_theta"] * stretch)


def _gguf_tensors(c: dict[str, Any], tensors: Tensors, arch: str) -> Tensors:
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, 1 + (c.get("num_hidden_layers") or c["n_layer"]))
    found: Tensors = {}
    tensors = _apart(tensors) if arch == "gpt-oss" else tensors
    stacked = tensors if arch == "gpt-oss" else stack_experts(tensors)
    for theirs, values in stacked.items():
        name = theirs.replace("e_score_correction_bias", "e_score_correction.bias").replace("language_model.", "")
        canonical = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert canonical is not None, name
        found[canonical] = np.ascontiguousarray(_converted(c, name, values))
    return found


def _apart(tensors: Tensors) -> Tensors:
    """The experts of gpt-oss: turned round, gate and up apart."""
    found: Tensors = {}
    for name, values in tensors.items():
        if name.endswith("sinks"):
            found[f"{name}.weight"] = values
        elif ".experts." not in name:
            found[name] = values
        else:
            stem, _, matrix = name.removesuffix("_bias").rpartition(".")
            suffix, turned = ("bias", values) if name.endswith("_bias") else ("weight", values.swapaxes(1, 2))
            parts = {"gate_proj": turned[:, ::2], "up_proj": turned[:, 1::2]}
            for part, own in (parts if matrix == "gate_up_proj" else {matrix: turned}).items():
                found[f"{stem}.{part}.{suffix}"] = own
    return found


def _converted(c: dict[str, Any], name: str, values: Any) -> Any:
    if c["model_type"] in ("gemma", "nemotron") and name.endswith("norm.weight"):
        return values + 1
    if c["model_type"] == "gpt2" and values.ndim == 2 and ".c_" in name:
        return values.T
    if c["model_type"] == "gpt_neox" and "query_key_value" in name:
        return values.reshape(c["num_attention_heads"], 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    if name.endswith("shared_expert_gate.weight"):
        return values[0]
    if c["model_type"] in PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = c["num_attention_heads"] if "q_proj" in name else c["num_key_value_heads"]
        return unrotated(values[:, None], heads)[:, 0] if values.ndim == 1 else unrotated(values, heads)
    return values


def _type_of(name: str, values: Any, type: TensorType) -> TensorType:
    exact = values.ndim == 1 or "ffn_gate_inp" in name or name.endswith(".bias")
    return TensorType.F32 if exact or values.shape[-1] % type.block_values else type
