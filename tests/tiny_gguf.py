"""A Hugging Face config and its tensors as GGUF says them.

Names come from the `gguf` package: an oracle for our own table.
"""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kvarn.formats.gguf.writer import Stored
from kvarn.formats.weights import TensorType

Tensors = dict[str, npt.NDArray[np.float32]]
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "vocab_size": "vocab_size",
}


def gguf_metadata(c: dict[str, Any]) -> dict[str, Any]:
    arch = _gguf_arch(c)
    facts = {key: c[name] for name, key in GGUF_KEYS.items() if c.get(name) is not None}
    if arch != "bert":
        facts["rope.dimension_count"] = head_dim_of(c)
    if "head_dim" in c:
        facts |= {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
    scaling = c.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        facts |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
    if kind == "yarn":
        facts["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if kind == "longrope":
        facts["rope.scaling.original_context_length"] = c["original_max_position_embeddings"]
        facts["rope.scaling.attn_factor"] = longrope_magnitude(c["max_position_embeddings"], c)
    if arch == "bert":
        facts |= {"attention.causal": False, "pooling_type": 2}
    return {"general.architecture": arch, "general.name": f"tiny {arch}"} | {f"{arch}.{k}": v for k, v in facts.items()}


def longrope_magnitude(context: int, entries: dict[str, Any]) -> float:
    """What the converter computes of the contexts of LongRoPE."""
    original = entries["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(context / original) / math.log(original))


def gguf_tensors(c: dict[str, Any], tensors: Tensors, type: TensorType) -> dict[str, Any]:
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == _gguf_arch(c)), c["num_hidden_layers"]
    )
    found: dict[str, npt.NDArray[np.float32]] = {}
    for name, values in stack_experts(tensors).items():
        canonical = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert canonical is not None, name
        found[canonical] = _converted(c, name, values)
    for name, values in _rope_tensors(c).items():
        found[name] = np.asarray(values, np.float32)
    return {name: _stored(name, values, type) for name, values in found.items()}


def _stored(name: str, values: npt.NDArray[np.float32], type: TensorType) -> Stored:
    exact = values.ndim == 1 or name.startswith(("position_embd", "token_types")) or "ffn_gate_inp" in name
    return Stored.quantized(values, TensorType.F32 if exact else type)


def stack_experts(tensors: Tensors) -> Tensors:
    """Stack `...experts.3.w1.weight` into the name that `gguf` knows for all of them."""
    found: Tensors = {}
    stacks: dict[str, list[npt.NDArray[np.float32]]] = {}
    for name, values in tensors.items():
        stem, experts, rest = name.partition(".experts.")
        if experts and "." in rest:
            matrix = rest.split(".", 1)[1]
            stacks.setdefault(f"{stem}.experts.{matrix}", []).append(values)
        else:
            found[name] = values
    return found | {name: np.stack(values) for name, values in stacks.items()}


def _converted(c: dict[str, Any], name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if c["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if _gguf_arch(c) == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = c["num_attention_heads"] if "q_proj" in name else c["num_key_value_heads"]
        return unrotated(values, heads)
    return values


def unrotated(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder rows of Q or K from rotation by halves to rotation of neighbours."""
    return values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def _rope_tensors(c: dict[str, Any]) -> dict[str, Any]:
    scaling = c.get("rope_scaling") or {}
    if "long_factor" in scaling:
        return {f"rope_factors_{n}.weight": scaling[f"{n}_factor"] for n in ("long", "short")}
    if scaling.get("rope_type") != "llama3":
        return {}
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    original, factors = scaling["original_max_position_embeddings"], []
    for i in range(head_dim_of(c) // 2):
        wavelength = 2 * math.pi * c["rope_theta"] ** (2 * i / head_dim_of(c))
        smooth = (original / wavelength - low) / (high - low)
        factors.append(1 / (min(max(smooth, 0), 1) * (1 - 1 / factor) + 1 / factor))
    return {"rope_freqs.weight": factors}


def _gguf_arch(c: dict[str, Any]) -> str:
    renamed = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
    return renamed.get(c["model_type"], c["model_type"])


def head_dim_of(c: dict[str, Any]) -> int:
    return int(c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]))
