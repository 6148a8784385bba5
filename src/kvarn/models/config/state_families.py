"""The keys of config.json of the model types with state spaces, with their values; as families.py has the others."""

from __future__ import annotations

from typing import Any, Final

INFINITE: Final = (0.0, float("inf"))
_STATE_SPACE: Final = {
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "vocab_size": None,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "max_position_embeddings": None,  # as far as it is to be used: nothing ends there
    "residual_in_fp32": True,
    "rescale_prenorm_residual": False,
    "time_step_rank": None,
}

_HYBRID: Final = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 8192,
    "vocab_size": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "original_max_position_embeddings": None,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": INFINITE,
}
_MAMBA: Final = _STATE_SPACE | {
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "intermediate_size": None,
    "state_size": 16,
    "tie_word_embeddings": True,
}

STATE_FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA | {"mixer_rms_eps": 1e-6},
    "mamba2": _STATE_SPACE
    | {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "chunk_size": 256}
    | {"time_step_limit": INFINITE, "tie_word_embeddings": False},
    "falcon_h1": _HYBRID
    | {"mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "mamba_rms_norm": False, "projectors_bias": False}
    | {"mlp_bias": False, "mlp_multipliers": None, "ssm_multipliers": None}
    | {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "attention_in_multiplier": 1.0}
    | {"attention_out_multiplier": 1.0, "key_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0},
    "bamba": _HYBRID
    | {"attn_layer_indices": None, "mlp_bias": False, "partial_rotary_factor": 0.5, "max_position_embeddings": 262144},
    "granitemoehybrid": _HYBRID
    | {"intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
    | {"attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}
    | {"position_embedding_type": None, "layer_types": None, "layers_block_type": None},
    "nemotron_h": {
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "vocab_size": None,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "layers_block_type": None,
        "layer_types": None,
        "hybrid_override_pattern": None,
        "num_nextn_predict_layers": 0,
        "mtp_layers_block_type": None,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "residual_in_fp32": False,
        "rescale_prenorm_residual": True,
        "moe_shared_expert_overlap": True,
        "use_mamba_kernels": True,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
}
