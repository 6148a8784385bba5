"""What a config.json that leaves a size, an epsilon or the whole rope out means by it, for each model type.

The defaults of the configuration classes of transformers, which a test reads from them. Model types without such a
class are not here: their config.json has to say everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "rms_norm_eps"),
)
# In the order of _NAMES. None: derived from the others, or the class has no such key.
_SIZES: Final[Mapping[str, tuple[float | None, ...]]] = {
    "llama": (4096, 11008, 32, 32, None, None, 2048, 1e-6),
    "llama4_text": (5120, 8192, 48, 40, 8, 128, 131072, 1e-5),
    "internlm3": (4096, 10240, 48, 32, 2, 128, 32768, 1e-5),
    "helium": (2560, 7040, 24, 20, 20, 128, 4096, 1e-8),
    "dots1": (4608, 10944, 62, 32, 32, None, 2048, 1e-6),
    "solar_open": (4096, None, 48, 64, 8, 128, 131072, 1e-5),
    "phimoe": (4096, 6400, 32, 32, 8, None, 131072, 1e-5),
    "mistral": (4096, 14336, 32, 32, 8, None, 131072, 1e-6),
    "mixtral": (4096, 14336, 32, 32, 8, None, 131072, 1e-5),
    "ministral": (4096, 14336, 32, 32, 8, None, 131072, 1e-6),
    "ministral3": (4096, 14336, 34, 32, 8, 128, 262144, 1e-5),
    "qwen2": (4096, 22016, 32, 32, 32, None, 32768, 1e-6),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        (8192, 29568, 80, 64, 8, None, 32768, 1e-5),
    ),
    "qwen2_moe": (2048, 5632, 24, 16, 16, None, 32768, 1e-6),
    "qwen3": (4096, 22016, 32, 32, 32, 128, 32768, 1e-6),
    "qwen3_moe": (2048, 6144, 24, 32, 4, None, 32768, 1e-6),
    "qwen3_vl_text": (4096, 22016, 32, 32, 32, 128, 128000, 1e-6),
    "qwen3_vl_moe_text": (2048, 5632, 24, 16, 16, None, 128000, 1e-6),
    "qwen3_next": (2048, 5632, 48, 16, 2, 256, 32768, 1e-6),
    "qwen3_5_text": (4096, 12288, 32, 16, 4, 256, 32768, 1e-6),
    "qwen3_5_moe_text": (2048, None, 40, 16, 2, 256, 32768, 1e-6),
    "lfm2": (2560, 12288, 32, 32, 8, None, 128000, None),
    "lfm2_moe": (2048, 7168, 32, 32, 8, None, 128000, None),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), (4096, 11008, 32, 32, None, None, 2048, 1e-6)),
    "hunyuan_v1_moe": (4096, 11008, 32, 32, None, None, 2048, 1e-5),
    "ernie4_5_moe": (2560, 12288, 28, 20, 4, None, 131072, 1e-5),
    "falcon": (4544, None, 32, 71, None, None, 2048, None),
    "gemma": (3072, 24576, 28, 16, 16, 256, 8192, 1e-6),
    "gemma2": (2304, 9216, 26, 8, 4, 256, 8192, 1e-6),
    **dict.fromkeys(("gemma3", "gemma3_text"), (2304, 9216, 26, 8, 4, 256, 131072, 1e-6)),
    **dict.fromkeys(("gemma4_text", "diffusion_gemma_text"), (2304, 9216, 30, 8, 4, 256, 131072, 1e-6)),
    "gemma3n_text": (2048, 16384, 35, 8, 2, 256, 32768, 1e-6),
    "smollm3": (2048, 11008, 36, 16, 4, None, 32768, 1e-6),
    "seed_oss": (4096, 27648, 64, 80, 8, 128, 524288, 1e-6),
    "olmo2": (4096, 11008, 32, 32, None, None, 2048, 1e-5),
    "olmo3": (4096, 11008, 32, 32, None, None, 2048, 1e-5),
    "olmoe": (2048, 2048, 16, 16, None, None, 4096, 1e-5),
    "granite": (4096, 11008, 32, 32, None, None, 2048, 1e-6),
    "lfm3": (2048, 7680, 24, 16, 4, 128, 128000, None),
    "afmoe": (2048, 6144, 32, 16, None, 128, 16384, 1e-5),
    "exaone_moe": (4096, 16384, 32, 32, 32, None, 2048, 1e-5),
    "hy_v3": (4096, 13312, 80, 64, 8, 128, 131072, 1e-5),
    "hyperclovax": (4096, 11008, 32, 32, None, None, 2048, 1e-6),
    "gemma4_unified_text": (2304, 9216, 30, 8, 4, 256, 262144, 1e-6),
    "glm": (4096, 13696, 40, 32, 2, 128, 131072, 1.5625e-7),
    "glm4": (4096, 13696, 40, 32, 2, 128, 131072, 1.5625e-7),
    "glm4_moe": (4096, 10944, 46, 96, 8, None, 131072, 1e-5),
    "exaone4": (4096, 16384, 32, 32, 32, None, 2048, 1e-5),
    "ernie4_5": (1024, 3072, 18, 16, 2, 128, 131072, 1e-5),
    "hunyuan_v1_dense": (4096, 11008, 32, 32, None, None, 2048, 1e-5),
    "cohere": (8192, 22528, 40, 64, None, None, 8192, None),
    "cohere2": (8192, 22528, 40, 64, None, None, 8192, None),
    "starcoder2": (3072, 12288, 30, 24, 2, None, 4096, None),
    "stablelm": (2560, 6912, 32, 32, 32, None, 4096, None),
    "phi": (2048, 8192, 24, 32, None, None, 2048, None),
    "phi3": (3072, 8192, 32, 32, None, None, 4096, 1e-5),
    "gpt_oss": (2880, 2880, 36, 64, 8, 64, 131072, 1e-5),
    "arcee": (2560, 18432, 32, 32, None, None, 4096, 1e-5),
    "nemotron": (6144, 24576, 32, 48, None, None, 4096, None),
    "gpt_neox": (6144, 24576, 44, 64, None, None, 2048, None),
    "deepseek_v2": (4096, 11008, 32, 32, None, None, 2048, 1e-6),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), (7168, 18432, 61, 128, 128, None, 4096, 1e-6)),
    "glm4_moe_lite": (2048, 10240, 47, 20, 20, None, 202752, 1e-5),
    "minicpm3": (2560, 6400, 62, 40, 40, None, 32768, 1e-5),
    "minimax_m2": (3072, 1536, 62, 48, 8, 128, 196608, 1e-6),
}
_LFM3: Final = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_YARN: Final = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
# The rope_parameters of the classes whose rope is not a plain one; null in config.json means the same as nothing.
_GEMMA4: Final = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
ROPES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text"), _GEMMA4),
        "lfm3": _LFM3,
        "gpt_oss": _YARN | {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        "ministral3": _YARN
        | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    }
)


def with_sizes(model_type: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model type, those of them that are sizes with the values of its class."""
    sizes = dict(zip(_NAMES, _SIZES.get(model_type, ()), strict=False))
    return {**keys, **{key: value for key, value in sizes.items() if key in keys and value is not None}}
