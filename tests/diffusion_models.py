"""Tiny random models of masked diffusion, as a Hugging Face folder or as a GGUF file with the same weights.

LLaDA's folder has its own names of tensors and of config entries; the others are named like the models they come from.
"""

from __future__ import annotations

import json
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
}
DIFFUSION = tuple(CONFIGS)
LIKE = {"llada": "llama", "Dream": "qwen2", "llada_moe": "qwen3_moe", "sdar": "qwen3"}
ARCHITECTURES = {"llada": "llada", "Dream": "dream", "llada_moe": "llada-moe", "sdar": "sdar"}

OWN_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
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
    tensors = random_tensors(arch, config | {"model_type": LIKE[config["model_type"]]})
    if format == "gguf":
        path = folder / f"{arch}-{type.name}.gguf"
        write_gguf(path, _metadata(config), _gguf_tensors(config, tensors, type))
        return path
    if config["model_type"] == "llada":
        config = {OWN_KEYS.get(key, key): value for key, value in config.items()}
        tensors = {_own_name(name): values for name, values in tensors.items()}
    path = folder / arch
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _own_name(name: str) -> str:
    for usual, own in OWN_TENSORS.items():
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
    if arch == "sdar":
        facts["diffusion.block_length"] = config["block_size"]
    ours = {"general.architecture": arch, "tokenizer.ggml.mask_token_id": config["mask_token_id"]}
    if arch != "dream":  # where nothing is said, the logits are shifted
        ours["diffusion.shift_logits"] = False
    return ours | {f"{arch}.{key}": value for key, value in facts.items()}


def _gguf_tensors(config: dict[str, Any], tensors: Tensors, type: TensorType) -> dict[str, Stored]:
    """SDAR has no names of its own in the `gguf` package: they are those of the model it comes from."""
    arch = {"sdar": "qwen3"}.get(config["model_type"], ARCHITECTURES[config["model_type"]])
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
