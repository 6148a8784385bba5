"""The keys of config.json of GLM-4 and of model types of 2026, as families.py has them of the others."""

from __future__ import annotations

from typing import Any, Final

from kvarn.models.config.shared_keys import BIAS, BIASES, DECODER, without

_GLM4: Final = DECODER | {"attention_bias": True, "partial_rotary_factor": 0.5}
_SHARED: Final = {"num_experts_per_tok": 8, "num_shared_experts": 1, "mlp_layer_types": None}
RECENT: Final[dict[str, dict[str, Any]]] = {
    "glm": _GLM4,
    "glm4": _GLM4,
    "lfm3": without(DECODER, "rms_norm_eps", "hidden_act")
    | BIAS
    | {"norm_eps": 1e-5, "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 7, "sliding_window": 256}
    | {"use_sandwich_norm": True, "use_attention_gate": True},
    "afmoe": DECODER
    | BIAS
    | without(_SHARED, "mlp_layer_types")
    | {"num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "moe_intermediate_size": 1408}
    | {"num_dense_layers": 1, "route_scale": 1.0, "global_attn_every_n_layers": 4, "sliding_window": 1024}
    | {"mup_enabled": False},
    "exaone_moe": DECODER
    | _SHARED
    | {"sliding_window": 4096, "sliding_window_pattern": 4, "first_k_dense_replace": 1, "num_experts": 64}
    | {"moe_intermediate_size": 1024, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    | {"n_group": 1, "topk_group": 1},
    "hy_v3": DECODER
    | BIASES
    | _SHARED
    | {"rope_theta": 11158840.0, "num_experts": 192, "num_local_experts": None, "moe_intermediate_size": 1536}
    | {"router_scaling_factor": 2.826},
    "hyperclovax": DECODER
    | BIASES
    | {"attention_multiplier": None, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    | {"use_post_norm": True},
}
