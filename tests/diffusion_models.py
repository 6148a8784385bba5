"""Tiny random models of masked diffusion, as a Hugging Face folder or as a GGUF file with the same weights.

The folders of LLaDA and LLaDA 2 have their own names of tensors and of config entries; the others are named like the
models they come from.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.tiny_gguf import GGUF_KEYS, Tensors, stack_experts, unrotated
from tests.tiny_models import COMMON, random_tensors

MASK_ID = 5  # inside the tiny vocabulary, a token like any other
BLOCK_LENGTH = 4
OURS = {"hidden_act": "silu", "mask_token_id": MASK_ID}
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": COMMON | OURS | {"model_type": "llada", "num_key_value_heads": 4},
    "llada-tied": COMMON | OURS | {"model_type": "llada", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "dream": COMMON | OURS | {"model_type": "Dream"},
    "llada-moe": COMMON
    | OURS
    | {"model_type": "llada_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "sdar": COMMON | OURS | {"model_type": "sdar", "head_dim": 32, "block_size": BLOCK_LENGTH},
    "dream-blocks": COMMON | OURS | {"model_type": "Dream", "block_size": BLOCK_LENGTH},
    "llada2": COMMON
    | OURS
    | {"model_type": "llada2_moe", "head_dim": 32, "partial_rotary_factor": 0.5, "block_size": BLOCK_LENGTH}
    | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_experts": 12, "num_experts_per_tok": 3}
    | {"n_group": 4, "topk_group": 2, "num_shared_experts": 1, "moe_intermediate_size": 32, "use_bias": False}
    | {"routed_scaling_factor": 2.5, "score_function": "sigmoid", "norm_topk_prob": True},
}
DIFFUSION = tuple(CONFIGS)
BLOCKS = ("sdar", "dream-blocks", "llada2")  # those that denoise block by block
LIKE = {"llada": "llama", "Dream": "qwen2", "llada_moe": "qwen3_moe", "sdar": "qwen3", "llada2_moe": "qwen3_moe"}
LIKE |= {"Fast_dLLM_Qwen": "qwen2", "a2d-llama": "llama", "a2d-qwen2": "qwen2", "a2d-qwen3": "qwen3"}
ARCHITECTURES = {"llada": "llada", "Dream": "dream", "llada_moe": "llada-moe", "sdar": "sdar", "llada2_moe": "llada2"}
# Folders only: GGUF has no names of their own for them.
FOLDERS = ("Fast_dLLM_Qwen", "a2d-llama", "a2d-qwen2", "a2d-qwen3")

OWN_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
}
LLADA2_KEYS = {
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "num_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
}
OWN_TENSORS = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


LLADA2_TENSORS = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "self_attn.": "attention.",
}


def diffusion_tensors(arch: str, config: dict[str, Any]) -> Tensors:
    """Draw the weights of a model, under the names of the model it comes from."""
    tensors = random_tensors(arch, config | {"model_type": LIKE[config["model_type"]]})
    return _llada2_tensors(arch, config, tensors) if config["model_type"] == "llada2_moe" else tensors


def _llada2_tensors(arch: str, config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Add shared experts and biases of experts; the first layers have one feed-forward instead."""
    rng = np.random.default_rng(zlib.crc32(arch.encode()) + 1)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return (1.2 / columns**0.5 * rng.standard_normal((rows, columns))).astype(np.float32)

    width, hidden = config["hidden_size"], config["num_shared_experts"] * config["moe_intermediate_size"]
    if not config.get("use_qk_norm", True):
        tensors = {name: values for name, values in tensors.items() if "self_attn.q_norm" not in name}
        tensors = {name: values for name, values in tensors.items() if "self_attn.k_norm" not in name}
    biased = ("q", "k", "v") * config.get("use_qkv_bias", False) + ("o",) * config["use_bias"]
    for name in [name for name in tensors if any(name.endswith(f"self_attn.{x}_proj.weight") for x in biased)]:
        tensors[name.replace("weight", "bias")] = rng.normal(0, 0.3, len(tensors[name])).astype(np.float32)
    for layer in range(config["num_hidden_layers"]):
        stem, is_dense = f"model.layers.{layer}.mlp.", layer < config["first_k_dense_replace"]
        if is_dense:
            tensors = {name: values for name, values in tensors.items() if not name.startswith(stem)}
        else:
            tensors[f"{stem}gate.expert_bias"] = rng.uniform(0.0, 0.5, config["num_experts"]).astype(np.float32)
        rows, part = (config["intermediate_size"], "") if is_dense else (hidden, "shared_experts.")
        tensors |= {f"{stem}{part}{name}_proj.weight": matrix(rows, width) for name in ("gate", "up")}
        tensors[f"{stem}{part}down_proj.weight"] = matrix(width, rows)
    return tensors


def tiny_diffusion(
    arch: str,
    folder: Path,
    format: Literal["safetensors", "gguf"] = "safetensors",
    *,
    type: TensorType = TensorType.F32,
    **changes: Any,
) -> Path:
    """Write one model under folder and return the path to open. changes: entries of the config."""
    config = CONFIGS[arch] | changes
    tensors = diffusion_tensors(arch, config)
    if format == "gguf":
        path = folder / f"{arch}-{type.name}.gguf"
        write_gguf(path, _metadata(config), _gguf_tensors(config, tensors, type))
        return path
    if config["model_type"] == "llada":
        config = {OWN_KEYS.get(key, key): value for key, value in config.items()}
        tensors = {_own_name(name): values for name, values in tensors.items()}
    if config["model_type"] == "llada2_moe":
        tensors = {_own_name(name, LLADA2_TENSORS): values for name, values in _fused_qkv(tensors).items()}
    path = folder / arch
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _fused_qkv(tensors: Tensors) -> Tensors:
    found = {name: values for name, values in tensors.items() if not any(f".{x}_proj" in name for x in "qkv")}
    for name in tensors:
        stem, is_q, suffix = name.partition("q_proj.")
        if is_q:
            parts = [tensors[f"{stem}{x}_proj.{suffix}"] for x in "qkv"]
            found[f"{stem}query_key_value.{suffix}"] = np.concatenate(parts)
    return found


def _own_name(name: str, table: dict[str, str] = OWN_TENSORS) -> str:
    for usual, own in table.items():
        name = name.replace(usual, own)
    return name


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    arch = ARCHITECTURES[config["model_type"]]
    facts = {key: config[name] for name, key in GGUF_KEYS.items() if config.get(name) is not None}
    facts["attention.causal"] = False
    if "head_dim" in config:
        facts |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if arch == "llada-moe":
        del facts["feed_forward_length"]
    if "block_size" in config:
        facts["diffusion.block_length"] = config["block_size"]
    if arch == "llada2":
        facts |= {key: config[name] for name, key in LLADA2_KEYS.items()}
        facts |= {"rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"])}
        facts |= {"expert_gating_func": 2, "expert_weights_norm": True}
        facts["expert_shared_feed_forward_length"] = config["num_shared_experts"] * config["moe_intermediate_size"]
    ours = {"general.architecture": arch, "tokenizer.ggml.mask_token_id": config["mask_token_id"]}
    if arch != "dream":  # where nothing is said, the logits are shifted
        ours["diffusion.shift_logits"] = False
    return ours | {f"{arch}.{key}": value for key, value in facts.items()}


def _gguf_tensors(config: dict[str, Any], tensors: Tensors, type: TensorType) -> dict[str, Stored]:
    """SDAR and LLaDA 2 have no names of their own in `gguf`: they are those of the models they come from."""
    arch = {"sdar": "qwen3", "llada2_moe": "bailingmoe2"}.get(config["model_type"])
    arch = arch or ARCHITECTURES[config["model_type"]]
    if arch == "bailingmoe2":
        names_there = LLADA2_TENSORS | {"gate.expert_bias": "gate.expert_bias.bias"}  # as its converter calls it
        tensors = {_own_name(name, names_there): values for name, values in _fused_qkv(tensors).items()}
    known = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch)
    names = gguf.get_tensor_name_map(known, config["num_hidden_layers"])
    found = {}
    for name, values in stack_experts(tensors).items():
        named = _own_name(name) if arch == "llada" else name
        canonical = names.get_name(named, try_suffixes=(".weight", ".bias"))
        assert canonical is not None, name
        is_exact = values.ndim == 1 or "ffn_gate_inp" in canonical
        stored = _interleaved(config, name, values) if arch == "llada" else values
        found[canonical] = Stored.quantized(np.ascontiguousarray(stored), TensorType.F32 if is_exact else type)
    return found


def _interleaved(config: dict[str, Any], name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return next((unrotated(values, count) for part, count in heads.items() if part in name), values)
