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
}
PERMUTED = ("smollm3", "granite", "ministral3")  # Q and K, for the rotation of neighbours
# What GGUF cannot say, or the converter does not.
WITHOUT_GGUF = {
    ("gemma", 1): "the base of its rope is not written",
    ("starcoder2", 1): "its window is not written",
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
}
UNWRITTEN = {"starcoder2": ("sliding_window",), "gemma": ("rope_theta",)}


def family_gguf(folder: Path, type: TensorType = TensorType.F32) -> Path:
    """Write the GGUF file beside the folder."""
    config = json.loads((folder / "config.json").read_text())
    arch = gguf_architecture(config["model_type"])
    tensors = _gguf_tensors(config, load_file(folder / "model.safetensors"), arch)
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
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    facts["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type") == "yarn":
        facts |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        facts["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if c.get("sliding_window") and "sliding_window" not in unwritten and c.get("layer_types"):
        facts["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in c["layer_types"]]
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
    names = gguf.get_tensor_name_map(number, c["num_hidden_layers"])
    found: Tensors = {}
    for name, values in stack_experts(tensors).items():
        canonical = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert canonical is not None, name
        found[canonical] = np.ascontiguousarray(_converted(c, name, values))
    return found


def _converted(c: dict[str, Any], name: str, values: Any) -> Any:
    if c["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if name.endswith("shared_expert_gate.weight"):
        return values[0]
    if c["model_type"] in PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = c["num_attention_heads"] if "q_proj" in name else c["num_key_value_heads"]
        return unrotated(values[:, None], heads)[:, 0] if values.ndim == 1 else unrotated(values, heads)
    return values


def _type_of(name: str, values: Any, type: TensorType) -> TensorType:
    exact = values.ndim == 1 or "ffn_gate_inp" in name or name.endswith(".bias")
    return TensorType.F32 if exact or values.shape[-1] % type.block_values else type
