"""Tiny random models of every architecture, as a Hugging Face folder or as a GGUF file with the same weights.

Made with NumPy alone from hand-written configs, so that tests of the native core need no other engine. GGUF names
come from the `gguf` package: an oracle for our own table.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType

Tensors = dict[str, npt.NDArray[np.float32]]

VOCAB = 160
WINDOW = 8
ORIGINAL_CONTEXT = 16  # of the LongRoPE model
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"}
PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu"}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON | LLAMA,
    "llama-tied": COMMON | LLAMA | {"tie_word_embeddings": True},
    "llama3": COMMON | LLAMA | {"rope_scaling": LLAMA3_ROPE},
    "llama-linear": COMMON | LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": COMMON
    | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "sliding_window": WINDOW,
    },
    "mixtral": COMMON
    | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu"}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": COMMON | QWEN2,
    "qwen2-yarn": COMMON | QWEN2 | {"rope_scaling": YARN_ROPE},
    "qwen3": COMMON
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "head_dim": 32},
    "qwen3moe": COMMON
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "head_dim": 32}
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gemma2": COMMON
    | GEMMA
    | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3}
    | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3": COMMON
    | GEMMA
    | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
    | {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": COMMON | PHI3 | {"sliding_window": WINDOW},
    "phi3-longrope": COMMON
    | PHI3
    | {"rope_scaling": LONG_ROPE, "original_max_position_embeddings": ORIGINAL_CONTEXT, "sliding_window": None},
    "bert": {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    },
}
ARCHITECTURES = tuple(CONFIGS)
DECODERS = tuple(name for name in ARCHITECTURES if name != "bert")


def tiny_model(
    arch: str,
    folder: Path,
    format: Literal["safetensors", "gguf"] = "safetensors",
    *,
    type: TensorType = TensorType.F32,
    wide: bool = False,
) -> Path:
    """Write one model under folder and return the path to open. wide: rows of 256, for the K-quants."""
    config = CONFIGS[arch] | ({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if wide else {})
    tensors = random_tensors(arch, config)
    if format == "gguf":
        path = folder / f"{arch}-{type.name}.gguf"
        write_gguf(path, _gguf_metadata(config), _gguf_tensors(config, tensors, type))
        return path
    path = folder / arch
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def random_tensors(arch: str, config: dict[str, Any]) -> Tensors:
    """Draw weights that keep the residual stream near unit size, so that every part shows in the logits."""
    rng = np.random.default_rng(zlib.crc32(arch.encode()))
    shapes = _encoder_shapes(config) if config["model_type"] == "bert" else _decoder_shapes(config)
    norm_mean = 0.0 if config["model_type"].startswith("gemma") else 1.0
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        if len(shape) > 1:
            scale = 0.5 if "embed" in name else 1.2 / math.sqrt(shape[-1])
            values *= scale * (
                1 / math.sqrt(shape[-1]) if config["model_type"].startswith("gemma") and "embed" in name else 1
            )
        else:
            values = 0.1 * values + (norm_mean if "norm" in name.lower() and name.endswith("weight") else 0.0)
        tensors[name] = values.astype(np.float32)
    return tensors


def _decoder_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, kind = c["hidden_size"], c["model_type"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], width)}
    for layer in range(c["num_hidden_layers"]):
        names = {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
        if kind.startswith("gemma"):
            names |= {f"{where}_feedforward_layernorm.weight": (width,) for where in ("pre", "post")}
        names |= _attention_shapes(c) | _feed_forward_shapes(c)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}
    shapes["model.norm.weight"] = (width,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], width)
    return shapes


def _attention_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, kind, head_dim = c["hidden_size"], c["model_type"], _head_dim(c)
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    rows = {"qkv_proj": q + 2 * kv} if kind == "phi3" else {"q_proj": q, "k_proj": kv, "v_proj": kv}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": (n, width) for name, n in rows.items()}
    shapes["self_attn.o_proj.weight"] = (width, q)
    if kind == "qwen2":
        shapes |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()}
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    return shapes


def _feed_forward_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, hidden, kind = c["hidden_size"], c["intermediate_size"], c["model_type"]
    if kind == "phi3":
        return {"mlp.gate_up_proj.weight": (2 * hidden, width), "mlp.down_proj.weight": (width, hidden)}
    if kind == "mixtral":
        stem, names, count = "block_sparse_moe", ("w1", "w3", "w2"), c["num_local_experts"]
    elif kind == "qwen3_moe":
        stem, names, count = "mlp", ("gate_proj", "up_proj", "down_proj"), c["num_experts"]
        hidden = c["moe_intermediate_size"]
    else:
        return {
            "mlp.gate_proj.weight": (hidden, width),
            "mlp.up_proj.weight": (hidden, width),
            "mlp.down_proj.weight": (width, hidden),
        }
    shapes: dict[str, tuple[int, ...]] = {f"{stem}.gate.weight": (count, width)}
    for expert in range(count):
        for name, shape in zip(names, ((hidden, width), (hidden, width), (width, hidden)), strict=True):
            shapes[f"{stem}.experts.{expert}.{name}.weight"] = shape
    return shapes


def _encoder_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, hidden = c["hidden_size"], c["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (c["vocab_size"], width),
        "embeddings.position_embeddings.weight": (c["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (c["type_vocab_size"], width),
    }
    matrices = {
        "attention.self.query": (width, width),
        "attention.self.key": (width, width),
        "attention.self.value": (width, width),
        "attention.output.dense": (width, width),
        "intermediate.dense": (hidden, width),
        "output.dense": (width, hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(c["num_hidden_layers"]):
        stem = f"encoder.layer.{layer}"
        norms += [f"{stem}.attention.output.LayerNorm", f"{stem}.output.LayerNorm"]
        for name, shape in matrices.items():
            shapes |= {f"{stem}.{name}.weight": shape, f"{stem}.{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes


def _gguf_arch(c: dict[str, Any]) -> str:
    renamed = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
    return renamed.get(c["model_type"], c["model_type"])


def _head_dim(c: dict[str, Any]) -> int:
    return int(c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]))


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


def _gguf_metadata(c: dict[str, Any]) -> dict[str, Any]:
    arch = _gguf_arch(c)
    facts = {key: c[name] for name, key in GGUF_KEYS.items() if c.get(name) is not None}
    if arch != "bert":
        facts["rope.dimension_count"] = _head_dim(c)
    if "head_dim" in c:
        facts |= {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
    scaling = c.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        facts |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
    if kind == "yarn":
        facts["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if kind == "longrope":
        original = c["original_max_position_embeddings"]
        share = c["max_position_embeddings"] / original
        facts["rope.scaling.original_context_length"] = original
        facts["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(share) / math.log(original))
    if arch == "bert":
        facts |= {"attention.causal": False, "pooling_type": 2}
    return {"general.architecture": arch, "general.name": f"tiny {arch}"} | {f"{arch}.{k}": v for k, v in facts.items()}


def _gguf_tensors(c: dict[str, Any], tensors: Tensors, type: TensorType) -> dict[str, Any]:
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
        if experts:
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
    for i in range(_head_dim(c) // 2):
        wavelength = 2 * math.pi * c["rope_theta"] ** (2 * i / _head_dim(c))
        smooth = (original / wavelength - low) / (high - low)
        factors.append(1 / (min(max(smooth, 0), 1) * (1 - 1 / factor) + 1 / factor))
    return {"rope_freqs.weight": factors}
