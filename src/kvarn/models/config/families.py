"""The keys of config.json that each model type has, with the values they have when config.json leaves them out.

As the configuration classes of transformers, or the models' own, give them; the sizes are in defaults.py. A key that a
model type does not have is never read for it: keys.py decides whether it may be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from kvarn.models.config.defaults import with_sizes
from kvarn.models.config.encoder_families import ENCODERS
from kvarn.models.config.gpt_families import GPT_FAMILIES
from kvarn.models.config.recent_families import RECENT
from kvarn.models.config.shared_keys import BIAS, BIASES, DECODER, EXPERTS, WINDOW, without
from kvarn.models.config.state_families import STATE_FAMILIES

_QWEN2: Final = DECODER | BIAS | WINDOW | {"max_window_layers": 28}
_QWEN3_MOE: Final = DECODER | BIAS | WINDOW | EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": None}
_GEMMA: Final = without(DECODER, "hidden_act") | {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3: Final = _GEMMA | {
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
_PER_LAYER: Final = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "final_logit_softcapping": None,
    "sliding_window": 512,
}
_GEMMA4: Final = (
    without(_GEMMA, "query_pre_attn_scalar", "rope_theta", "rope_scaling", "original_max_position_embeddings")
    | BIAS
    | _PER_LAYER
    | {"global_head_dim": 512, "num_global_key_value_heads": None, "per_layer_config": None, "attention_k_eq_v": False}
    | {"use_double_wide_mlp": False, "enable_moe_block": False}
    | {"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
)
_DIFFUSION_GEMMA: Final = without(
    _GEMMA4, *_PER_LAYER, "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block"
) | {"sliding_window": 512, "final_logit_softcapping": 30.0}
_GEMMA3N: Final = (
    without(_GEMMA, "query_pre_attn_scalar")
    | BIAS
    | _PER_LAYER
    | {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "num_kv_shared_layers": 15}
    | {"final_logit_softcapping": 30.0, "laurel_rank": 64, "activation_sparsity_pattern": None}
    | {"altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True, "altup_coef_clip": 120.0}
)
_LAYER_NORM: Final = without(DECODER, "rms_norm_eps") | {"layer_norm_eps": 1e-5}
_COHERE: Final = _LAYER_NORM | BIAS | {"logit_scale": 0.0625, "tie_word_embeddings": True, "use_gated_activation": True}
_DELTA_NET: Final = {
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_MOE: Final = DECODER | BIAS | EXPERTS | _DELTA_NET | {"moe_intermediate_size": 512, "norm_topk_prob": True}
_QWEN35_MOE: Final = _DELTA_MOE | {"num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512}
_LATENT: Final = without(DECODER, "layer_types") | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "qk_head_dim": 192,
}
_LATENT_MOE: Final = _LATENT | {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
    **dict.fromkeys(("scoring_func", "topk_method", "num_mtp_layers")),
}
_GRANITE_MOE: Final = (
    DECODER
    | BIAS
    | {"attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    | {"num_local_experts": 8, "num_experts_per_tok": 2}
)
_VISION_TEXT: Final = {"rope_theta": 1000000.0, "rope_scaling": None, "max_window_layers": 80}
_MASK: Final = {"mask_token_id": None}
_LLADA: Final = {
    **dict.fromkeys(("d_model", "n_layers", "n_heads", "n_kv_heads", "mlp_hidden_size", "max_sequence_length")),
    "embedding_size": None,
    "weight_tying": False,
}
_LLADA_MOE: Final = EXPERTS | {"expert_intermediate_size": None, "moe_layer_freq": None}
_LLADA2: Final = (
    without(DECODER, "layer_types")
    | without(EXPERTS, "num_local_experts")
    | {"norm_topk_prob": True, "num_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 8, "topk_group": 4}
    | {"routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "use_qk_norm": True, "use_qkv_bias": False}
    | {"use_bias": True, "score_function": "sigmoid", "block_size": None, "mask_token_id": None}
)

_AUTOREGRESSIVE: Final[dict[str, dict[str, Any]]] = {
    "llama": DECODER | BIASES,
    "llama4_text": DECODER
    | BIAS
    | {"rope_theta": 500000.0, "num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16384}
    | {"moe_layers": None, "interleave_moe_layer_step": 1, "no_rope_layers": None, "no_rope_layer_interval": 4}
    | {"attention_chunk_size": 8192, "use_qk_norm": True, "attn_temperature_tuning": True}
    | {"floor_scale": 8192, "attn_scale": 0.1},
    "internlm3": DECODER | BIAS,
    "helium": DECODER | BIASES | {"rope_theta": 100000.0},
    "dots1": DECODER
    | BIAS
    | {"n_routed_experts": None, "num_local_experts": None, "num_experts_per_tok": None, "n_shared_experts": None}
    | {"moe_intermediate_size": 1408, "first_k_dense_replace": 0, "norm_topk_prob": False, "n_group": 1}
    | {"topk_group": 1, "routed_scaling_factor": 1.0, "sliding_window": 4096, "max_window_layers": 62},
    "solar_open": without(DECODER, "intermediate_size")
    | BIAS
    | {"rope_theta": 1000000.0, "n_routed_experts": 128, "num_local_experts": None, "num_experts_per_tok": 8}
    | {"n_shared_experts": 1, "moe_intermediate_size": 1280, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 1.0},
    "mistral": DECODER | {"sliding_window": 4096},
    "mixtral": DECODER
    | {"rope_theta": 1000000.0, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": _QWEN2,
    "qwen3": _QWEN2,
    "qwen3_moe": _QWEN3_MOE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": without(
        _GEMMA4,
        *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block"),
        *("num_experts", "top_k_experts", "moe_intermediate_size"),
    )
    | {"sliding_window": 1024, "use_bidirectional_attention": "vision"},
    "smollm3": DECODER
    | BIASES
    | {"rope_theta": 2000000.0, "tie_word_embeddings": True, "no_rope_layers": None, "no_rope_layer_interval": 4}
    | {"use_sliding_window": False, "sliding_window": None},
    "seed_oss": DECODER | BIASES | {"attention_bias": True, "attention_out_bias": False},
    "gemma": DECODER
    | BIAS
    | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None, "tie_word_embeddings": True},
    "olmo2": DECODER | BIAS,
    "olmo3": DECODER | BIAS | {"rope_theta": 500000.0, "sliding_window": 4096},
    "olmoe": DECODER | BIAS | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    "granite": DECODER
    | BIASES
    | {"attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE | {"shared_intermediate_size": 0},
    "exaone4": DECODER | {"sliding_window": 4096, "sliding_window_pattern": 4},
    "ernie4_5": DECODER | {"rope_theta": 500000.0, "use_bias": False, "tie_word_embeddings": True},
    "ernie4_5_moe": DECODER
    | {"rope_theta": 500000.0, "use_bias": False, "tie_word_embeddings": True, "moe_intermediate_size": 1536}
    | {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2}
    | {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}
    | {"moe_norm_min": 1e-12, "num_experts": None, "num_experts_per_tok": None},
    "hunyuan_v1_dense": DECODER | BIAS,
    "hunyuan_v1_moe": DECODER
    | BIAS
    | {"num_local_experts": None, "num_experts": 1, "num_experts_per_tok": None, "moe_topk": 1},
    "cohere": _COHERE | {"rope_theta": 500000.0},
    "cohere2": _COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
    "starcoder2": without(_LAYER_NORM, "layer_norm_eps")
    | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    | {"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None},
    "stablelm": _LAYER_NORM
    | {"partial_rotary_factor": 0.25, "rotary_pct": None, "use_qkv_bias": False, "use_parallel_residual": False},
    "phi": _LAYER_NORM | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    "ministral": DECODER | {"sliding_window": 4096},
    "ministral3": DECODER | {"sliding_window": None},
    "qwen2_vl": _QWEN2 | _VISION_TEXT,
    "qwen2_vl_text": _QWEN2 | _VISION_TEXT,
    "qwen2_5_vl": _QWEN2 | _VISION_TEXT,
    "qwen2_5_vl_text": _QWEN2 | _VISION_TEXT,
    "qwen3_vl_text": without(DECODER, "layer_types") | BIAS | {"rope_theta": 500000.0},
    "qwen3_vl_moe_text": without(_QWEN3_MOE, "layer_types", "norm_topk_prob", *WINDOW)
    | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "rope_theta": 500000.0}
    | {"tie_word_embeddings": True},
    "qwen2_moe": without(_QWEN3_MOE, "num_local_experts")
    | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    | {"max_window_layers": 28, "shared_expert_intermediate_size": 5632, "qkv_bias": True},
    "qwen3_next": _DELTA_MOE
    | {"num_experts": 512, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512}
    | {"decoder_sparse_step": 1, "mlp_only_layers": None},
    "qwen3_5_text": DECODER | BIAS | _DELTA_NET,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "lfm2": without(DECODER, "rms_norm_eps")
    | {"norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": True, "tie_embedding": None}
    | {"conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": None, "block_ff_dim": None}
    | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
    "lfm2_moe": without(DECODER, "rms_norm_eps", "hidden_act")
    | {"norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": True, "tie_embedding": None}
    | {"conv_bias": False, "conv_L_cache": 3, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1792, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
    "gpt_oss": DECODER
    | {"rope_theta": 150000.0, "attention_bias": True, "sliding_window": 128}
    | {"num_local_experts": 128, "num_experts_per_tok": 4}
    | {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "arcee": DECODER | BIASES | {"hidden_act": "relu2"},
    "nemotron": without(_LAYER_NORM, "layer_norm_eps")
    | BIASES
    | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "gpt_neox": without(_LAYER_NORM, "num_key_value_heads", "head_dim")
    | {"hidden_act": "gelu", "attention_bias": True, "use_parallel_residual": True, "rotary_pct": 0.25}
    | {"rotary_emb_base": 10000.0, "rope_theta": None},
    "falcon": without(
        _LAYER_NORM, "num_key_value_heads", "head_dim", "intermediate_size", "layer_norm_eps", "hidden_act"
    )
    | {"layer_norm_epsilon": 1e-5, "activation": "gelu", "ffn_hidden_size": None, "num_kv_heads": None, "bias": False}
    | {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "num_ln_in_parallel_attn": None}
    | {"tie_word_embeddings": True},
    "glm4_moe": DECODER
    | without(EXPERTS, "num_experts")
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 1408}
    | {"attention_bias": False, "partial_rotary_factor": 0.5, "use_qk_norm": False, "norm_topk_prob": True}
    | {"n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
    | {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1, "scoring_func": None},
    "deepseek_v2": without(_LATENT_MOE, "rope_interleave", "num_nextn_predict_layers", "num_mtp_layers")
    | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None, "moe_intermediate_size": 1407}
    | {"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    | {"n_group": None, "topk_group": None, "topk_method": "greedy"},
    "deepseek_v3": _LATENT_MOE,
    "kimi_k2": _LATENT_MOE,
    "glm4_moe_lite": without(_LATENT_MOE, "first_k_dense_replace")
    | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_head_dim": 256, "v_head_dim": 256, "n_routed_experts": 64}
    | {"num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8}
    | {"n_group": 1, "topk_group": 1, "mlp_layer_types": None},
    "minicpm3": _LATENT
    | {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None}
    | {"head_dim": 32, "qk_head_dim": 96}
    | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True},
    "minimax_m2": DECODER
    | {"rope_theta": 5000000.0, "num_local_experts": 256, "num_experts_per_tok": 8}
    | {"partial_rotary_factor": None, "rotary_dim": None, "scoring_func": None},
    "phimoe": DECODER
    | BIAS
    | {"rope_theta": 1000000.0, "sliding_window": None, "num_local_experts": 16, "num_experts_per_tok": 2}
    | {"router_jitter_noise": 0.01, "lm_head_bias": False},
    "phi3": DECODER | {"sliding_window": None, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
}

FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        **{name: with_sizes(name, keys | {"is_causal": True}) for name, keys in _AUTOREGRESSIVE.items()},
        **{name: with_sizes(name, keys | {"is_causal": True}) for name, keys in STATE_FAMILIES.items()},
        **{name: {**keys, "is_causal": True} for name, keys in GPT_FAMILIES.items()},
        **{name: with_sizes(name, keys | {"is_causal": True}) for name, keys in RECENT.items()},
        **ENCODERS,
        "diffusion_gemma_text": with_sizes("diffusion_gemma_text", _DIFFUSION_GEMMA),
        "llada": DECODER | _LLADA | _LLADA_MOE | _MASK,
        "llada_moe": DECODER | _LLADA_MOE | _MASK,
        "llada2_moe": _LLADA2,
        "llada2_moe_veomni": _LLADA2,
        "Dream": _QWEN2 | _MASK | {"block_size": None},
        "dream": _QWEN2 | _MASK | {"block_size": None},
        "Fast_dLLM_Qwen": _QWEN2 | _MASK | {"bd_size": None},
        "a2d-llama": DECODER | BIAS | _MASK | {"block_size": None},
        "a2d-qwen2": _QWEN2 | _MASK | {"block_size": None},
        "a2d-qwen3": _QWEN2 | _MASK | {"block_size": None, "head_dim": 128},
        "sdar": _QWEN2 | _MASK | {"block_size": None, "head_dim": 128},
        "sdar_moe": _QWEN3_MOE | _MASK | {"block_size": None},
    }
)
