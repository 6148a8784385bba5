"""The keys of config.json that many model types share, with their values; families.py says who has which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

DIMENSIONS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def without(keys: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The keys less some of them."""
    return {key: value for key, value in keys.items() if key not in names}


# None: there is no value to fall back on.
DECODER: Final[dict[str, Any]] = {
    **dict.fromkeys(DIMENSIONS),
    "rms_norm_eps": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "original_max_position_embeddings": None,
    "layer_types": None,
}
BIAS: Final = {"attention_bias": False}
BIASES: Final = BIAS | {"mlp_bias": False}
WINDOW: Final = {"use_sliding_window": False, "sliding_window": 4096}
EXPERTS: Final = {
    "num_local_experts": None,
    "num_experts": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
    "norm_topk_prob": False,
}
