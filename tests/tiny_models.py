"""Tiny random models of every architecture, as a Hugging Face folder or as a GGUF file with the same weights.

Made with NumPy alone from hand-written configs, so that tests of the native core need no other engine.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from kvarn.formats.gguf.writer import write_gguf
from kvarn.formats.weights import TensorType
from tests.tiny_gguf import Tensors, gguf_metadata, gguf_tensors, head_dim_of

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
        write_gguf(path, gguf_metadata(config), gguf_tensors(config, tensors, type))
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
    width, kind, head_dim = c["hidden_size"], c["model_type"], head_dim_of(c)
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
