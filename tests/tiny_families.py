"""Tiny random models of the families that transformers has classes for, in shapes that nobody would choose.

Each family has three: other numbers of heads, odd sizes, windows shorter than the prompt. The folder is what
transformers saves; the GGUF file has the same weights.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 120
WINDOW = 8
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Heads, KV heads, size of a head, width, hidden, layers.
SHAPES = ((4, 2, 16, 64, 96, 4), (3, 1, 24, 72, 56, 3), (5, 5, 8, 40, 88, 5))
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
MOE = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
SOLAR = {"moe_intermediate_size": 24, "routed_scaling_factor": 1.5}
UNCUT_YARN = YARN | {"truncate": False, "beta_fast": 8.0}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
SHORT_MROPE = {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
}
DELTA_MOE = DELTA_NET | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA4 = {"num_local_experts": 5, "intermediate_size_mlp": 72, "attention_chunk_size": WINDOW, "floor_scale": 6}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
WIDE_LATENT = {"q_lora_rank": None, "kv_lora_rank": 33, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 20}
LATENT_MOE = LATENT | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
TRINITY = {"moe_intermediate_size": 24, "sliding_window": WINDOW, "num_shared_experts": 1}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LFM2_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1}
ERNIE_MOE = {"moe_intermediate_size": 24, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
GEMMA3N = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 6} | {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}
HYBRID = {"mamba_d_state": 12, "mamba_chunk_size": 8}
GRANITE = HYBRID | {"mamba_n_heads": 4, "mamba_expand": 1, "attention_multiplier": 0.3}
NEMOTRON = {"mamba_num_heads": 6, "mamba_head_dim": 10, "ssm_state_size": 12, "n_groups": 2, "chunk_size": 8} | {
    "time_step_min": 1e-9
}
LINEAR = PLAIN | {"rope_type": "linear", "factor": 3.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
GEMMA3_ROPE = {"full_attention": LINEAR | {"rope_theta": 1e6}, "sliding_attention": PLAIN | {"rope_theta": 5000.0}}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.6}
# What each family adds, one entry for each of the three shapes.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        {"attention_bias": True},
        {"mlp_bias": True, "rope_parameters": YARN},
        {"rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 4.0}, "tie_word_embeddings": True},
    ),
    "mistral": (
        {"sliding_window": WINDOW},
        {"sliding_window": None, "head_dim": 14, "rope_parameters": YARN},
        SIX_HEADS | {"sliding_window": 3, "head_dim": 10, "rope_parameters": LINEAR},
    ),
    "mixtral": (
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5},
        {"num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 18, "rope_parameters": YARN},
        SIX_HEADS | {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 6, "tie_word_embeddings": True},
    ),
    "qwen2": (
        {"rope_parameters": YARN, "tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        {"rope_parameters": LINEAR, "num_attention_heads": 10, "num_key_value_heads": 2},
    ),
    "qwen3": (
        {"head_dim": 10, "attention_bias": True, "rope_parameters": LINEAR},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "head_dim": 36},
        {"num_attention_heads": 6, "num_key_value_heads": 1, "rope_parameters": YARN},
    ),
    "qwen3_moe": (
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": False}
        | {"mlp_only_layers": [1], "attention_bias": True, "head_dim": 10},
        SIX_HEADS
        | {"num_experts": 7, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "norm_topk_prob": True}
        | {"rope_parameters": YARN},
    ),
    "gemma2": (
        {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
        | {"query_pre_attn_scalar": 16},
        {"sliding_window": 5, "head_dim": 20, "query_pre_attn_scalar": 33, "hidden_activation": "gelu"}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        SIX_HEADS
        | {"hidden_size": 48, "sliding_window": 3, "head_dim": 10, "query_pre_attn_scalar": 10}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "rope_parameters": LINEAR},
    ),
    "gemma3_text": (
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "rope_parameters": GEMMA3_ROPE},
        {"sliding_window": 5, "head_dim": 20, "query_pre_attn_scalar": 20, "final_logit_softcapping": 2.0}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "rope_parameters": GEMMA3_ROPE},
        SIX_HEADS
        | {"hidden_size": 48, "sliding_window": 3, "head_dim": 10, "query_pre_attn_scalar": 7}
        | {"hidden_activation": "gelu"}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    ),
    "phi3": (
        {"sliding_window": WINDOW},
        {"rope_parameters": LONGROPE | {"short_factor": [1.0 + 0.2 * i for i in range(12)], "long_factor": [2.0] * 12}}
        | {"original_max_position_embeddings": 64},
        {"sliding_window": 3, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.75}, "tie_word_embeddings": True}
        | {"num_attention_heads": 10, "num_key_value_heads": 2, "hidden_size": 80},
    ),
    "smollm3": (
        {"no_rope_layer_interval": 4},
        {"tie_word_embeddings": False, "mlp_bias": True},
        {"attention_bias": True, "rope_parameters": YARN},
    ),
    "seed_oss": (
        {},
        {"attention_out_bias": True, "mlp_bias": True},
        {"attention_bias": False, "rope_parameters": YARN},
    ),
    "gemma": ({}, {"rope_parameters": PLAIN | {"rope_theta": 500.0}}, {"hidden_act": "gelu"}),
    "olmo2": ({}, {"rms_norm_eps": 1e-3}, {"rope_parameters": YARN}),
    "olmo3": (
        {"sliding_window": WINDOW},
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {"sliding_window": WINDOW, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    ),
    "olmoe": (
        {"num_experts": 6, "num_experts_per_tok": 2},
        {"num_experts": 5, "num_experts_per_tok": 3, "rope_parameters": YARN},
        {"num_experts": 4, "num_experts_per_tok": 1, "attention_bias": True},
    ),
    "granite": (
        {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 1.7},
        {"attention_multiplier": 0.2, "attention_bias": True, "mlp_bias": True},
        {"attention_multiplier": 0.4, "residual_multiplier": 1.5, "tie_word_embeddings": True},
    ),
    "glm4": ({}, {"attention_bias": False}, {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}),
    "exaone4": (
        {"sliding_window": WINDOW},
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        {"sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "ernie4_5": ({}, {"use_bias": True}, {"tie_word_embeddings": False}),
    "hunyuan_v1_dense": (
        {},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "cohere": ({}, {"logit_scale": 0.5, "attention_bias": True}, {"rope_parameters": PLAIN}),
    "cohere2": (
        {"sliding_window": WINDOW},
        {"sliding_window": 5, "logit_scale": 1.5},
        {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 3},
    ),
    "starcoder2": ({}, {"sliding_window": WINDOW}, {"use_bias": False, "tie_word_embeddings": False}),
    "stablelm": (
        {},
        {"use_qkv_bias": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
        {"use_parallel_residual": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.75}},
    ),
    "phi": ({}, {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}, {"layer_norm_eps": 1e-3}),
    "ministral": (
        {"sliding_window": WINDOW},
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"sliding_window": 3, "layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
    ),
    "ministral3": (
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16} | MSCALE},
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 7} | MSCALE},
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 5} | MSCALE},
    ),
    "qwen2_moe": (
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
        {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    ),
    "arcee": ({}, {"attention_bias": True, "mlp_bias": True}, {"rope_parameters": YARN}),
    "nemotron": (
        {},
        {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}},
        {"norm_eps": 1e-3, "mlp_bias": True},
    ),
    "gpt_neox": (
        {},
        {"use_parallel_residual": False, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
        {"rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}},
    ),
    "gpt2": ({}, {"layer_norm_epsilon": 1e-3}, {"activation_function": "gelu"}),
    "glm": ({}, {"attention_bias": False}, {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}),
    "hyperclovax": (
        {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 1.7},
        {"use_post_norm": False, "attention_bias": True, "mlp_bias": True},
        {"residual_multiplier": 1.5, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "granitemoeshared": (
        {"num_local_experts": 6, "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 1.7}
        | {"shared_intermediate_size": 40},
        {"num_local_experts": 5, "num_experts_per_tok": 3, "attention_multiplier": 0.2, "attention_bias": True},
        {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_multiplier": 0.4, "residual_multiplier": 1.5}
        | {"shared_intermediate_size": 56},
    ),
    "exaone_moe": (
        TRINITY | {"num_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
        TRINITY
        | {"num_experts": 6, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 3}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False},
        TRINITY
        | {"num_experts": 9, "num_experts_per_tok": 4, "sliding_window": 3, "sliding_window_pattern": 2}
        | {"num_shared_experts": 2, "first_k_dense_replace": 2},
    ),
    "hy_v3": (
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "attention_bias": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 2},
        {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "router_scaling_factor": 0.7}
        | {"rope_parameters": YARN},
    ),
    "afmoe": (
        TRINITY | {"num_experts": 6, "num_experts_per_tok": 2, "mup_enabled": True},
        TRINITY
        | {"num_experts": 5, "num_experts_per_tok": 3, "num_dense_layers": 0, "global_attn_every_n_layers": 4}
        | {"attention_bias": True, "route_scale": 1.7, "num_shared_experts": 2, "mup_enabled": True},
        TRINITY
        | {"num_experts": 4, "num_experts_per_tok": 1, "sliding_window": 3, "num_dense_layers": 2}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
    ),
    "lfm3": (
        {"sliding_window": WINDOW, "layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
        {"sliding_window": 5, "layer_types": ["sliding_attention", "conv", "full_attention"], "conv_L_cache": 4}
        | {"use_sandwich_norm": False, "attention_bias": True}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
        {"sliding_window": 3, "use_attention_gate": False, "conv_L_cache": 2, "tie_word_embeddings": False},
    ),
    "gpt_bigcode": ({}, {"multi_query": False}, {"activation_function": "gelu", "n_inner": 72}),
    "gpt_neo": (
        {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
        {"attention_types": [[["local"], 2], [["global"], 1]], "window_size": 5},
        {"attention_types": [[["local", "global"], 2], [["local"], 1]], "window_size": 3, "intermediate_size": 72},
    ),
    "gptj": ({"rotary_dim": 8}, {"rotary_dim": 6, "n_inner": 72}, {"rotary_dim": 8, "activation_function": "gelu"}),
    "bloom": ({}, {}, {"layer_norm_epsilon": 1e-3}),
    "opt": ({"ffn_dim": 56}, {"enable_bias": False}, {"activation_function": "gelu", "ffn_dim": 88}),
    "glm4_moe": (
        MOE | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "use_qk_norm": True},
        MOE | {"n_routed_experts": 6, "num_experts_per_tok": 2, "attention_bias": True, "norm_topk_prob": False},
        MOE | {"n_routed_experts": 9, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    ),
    "minimax_m2": (
        {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
        {"num_local_experts": 5, "num_experts_per_tok": 3, "rotary_dim": 12},
        {"num_local_experts": 4, "num_experts_per_tok": 1, "rotary_dim": 8},
    ),
    "gpt_oss": (
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW, "rope_parameters": UNCUT_YARN},
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 5, "rope_parameters": UNCUT_YARN},
        {"num_local_experts": 6, "num_experts_per_tok": 1, "sliding_window": 3, "rope_parameters": UNCUT_YARN},
    ),
    "qwen3_next": (
        DELTA_MOE | {"num_experts": 6, "num_experts_per_tok": 2},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
        | {"num_experts": 5, "num_experts_per_tok": 3, "linear_conv_kernel_dim": 2, "attention_bias": True}
        | {
            "full_attention_interval": 3,
            "mlp_only_layers": [0],
            "shared_expert_intermediate_size": 16,
            "moe_intermediate_size": 32,
        },
        DELTA_MOE | {"num_experts": 4, "num_experts_per_tok": 1, "full_attention_interval": 5},
    ),
    "qwen3_5_text": (
        DELTA_NET,
        {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 20, "linear_value_head_dim": 8}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "linear_conv_kernel_dim": 3},
        DELTA_NET | {"linear_num_value_heads": 6, "linear_key_head_dim": 24, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_text": (
        DELTA_MOE | {"num_experts": 6, "num_experts_per_tok": 2},
        DELTA_MOE | {"num_experts": 5, "num_experts_per_tok": 3, "linear_num_value_heads": 2},
        DELTA_MOE | {"num_experts": 4, "num_experts_per_tok": 1, "linear_conv_kernel_dim": 5},
    ),
    "qwen3_5": (DELTA_NET, DELTA_NET | {"linear_conv_kernel_dim": 3}, DELTA_NET | {"linear_num_value_heads": 2}),
    "lfm2": (
        {"layer_types": ["conv", "full_attention", "conv", "conv"]},
        {"full_attn_idxs": [1], "conv_L_cache": 4, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3},
        {"layer_types": ["conv"] * 4 + ["full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 2},
    ),
    "lfm2_moe": (
        LFM2_MOE | {"layer_types": ["conv", "full_attention", "conv", "conv"]},
        LFM2_MOE
        | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4, "num_experts": 5}
        | {"use_expert_bias": False, "norm_topk_prob": False, "num_experts_per_tok": 3},
        LFM2_MOE
        | {"layer_types": ["conv"] * 4 + ["full_attention"], "num_dense_layers": 2, "routed_scaling_factor": 1.5},
    ),
    "ernie4_5_moe": (
        ERNIE_MOE | {"moe_num_experts": 6, "moe_k": 2},
        ERNIE_MOE | {"moe_num_experts": 5, "moe_k": 3, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
        ERNIE_MOE | {"moe_num_experts": 4, "moe_k": 1, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
    ),
    "falcon": (
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"bias": True, "ffn_hidden_size": 56},
        {"multi_query": False, "parallel_attn": False, "tie_word_embeddings": False, "activation": "gelu_pytorch_tanh"},
    ),
    "granitemoe": (
        {"num_local_experts": 6, "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 1.7},
        {"num_local_experts": 5, "num_experts_per_tok": 3, "attention_multiplier": 0.2, "attention_bias": True},
        {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_multiplier": 0.4, "residual_multiplier": 1.5},
    ),
    "hunyuan_v1_moe": (
        {"num_experts": 6, "moe_topk": 2},
        {"num_experts": 5, "moe_topk": 3, "attention_bias": True},
        {"num_experts": 4, "moe_topk": 1}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "gemma3n_text": (
        GEMMA3N | {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.0, 0.8, 0.0]},
        GEMMA3N
        | {"num_kv_shared_layers": 0, "altup_num_inputs": 3, "sliding_window": 5, "altup_correct_scale": False}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "intermediate_size": [56, 48, 88]}
        | {"vocab_size_per_layer_input": 100},
        GEMMA3N
        | {"num_kv_shared_layers": 3, "altup_num_inputs": 2, "altup_active_idx": 1, "sliding_window": 3}
        | {"activation_sparsity_pattern": [0.5, 0.7, 0.0, 0.99, 0.3], "attention_bias": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    ),
    "gemma4_text": (
        {"hidden_size_per_layer_input": 8, "sliding_window": WINDOW, "global_head_dim": 32, "num_kv_shared_layers": 1}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
        | {"final_logit_softcapping": 3.0, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
        | {"moe_intermediate_size": 24},
        {"hidden_size_per_layer_input": 0, "sliding_window": 5, "global_head_dim": 40, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 40}
        | {"rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": PLAIN}},
        {"hidden_size_per_layer_input": 12, "sliding_window": 3}
        | {"global_head_dim": 24, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"], "attention_bias": True},
    ),
    "gemma4_unified_text": (
        {"sliding_window": WINDOW, "global_head_dim": 32, "num_kv_shared_layers": 1}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
        | {"final_logit_softcapping": 3.0},
        {"sliding_window": 5, "global_head_dim": 40, "attention_k_eq_v": True, "num_global_key_value_heads": 3}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": PLAIN}},
        {"sliding_window": 3, "global_head_dim": 24, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"], "attention_bias": True},
    ),
    "deepseek_v2": (
        LATENT_MOE
        | WIDE_LATENT
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 34}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
        LATENT_MOE
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"topk_method": "group_limited_greedy", "n_shared_experts": 1},
        LATENT_MOE | {"n_routed_experts": 4, "num_experts_per_tok": 1, "q_lora_rank": 7, "rope_parameters": YARN},
    ),
    "deepseek_v3": (
        LATENT_MOE
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        LATENT_MOE
        | WIDE_LATENT
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        LATENT_MOE
        | {"n_routed_experts": 9, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2, "rope_interleave": False},
    ),
    "glm4_moe_lite": (
        LATENT_MOE | {"n_routed_experts": 5, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6},
        LATENT_MOE
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        LATENT_MOE | WIDE_LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 1, "rms_norm_eps": 1e-6},
    ),
    "minicpm3": (
        LATENT | {"rms_norm_eps": 1e-6},
        LATENT | {"scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 24, "v_head_dim": None},
        WIDE_LATENT | {"scale_depth": None, "dim_model_base": None, "rope_parameters": YARN | {"mscale_all_dim": 1.3}},
    ),
    "mamba": (
        {"state_size": 8, "time_step_rank": 6, "tie_word_embeddings": False},
        {"state_size": 5, "conv_kernel": 3, "use_bias": True, "use_conv_bias": False},
        {"state_size": 16, "conv_kernel": 2, "expand": 3, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False},
    ),
    "falcon_mamba": (
        {"state_size": 8, "time_step_rank": 6, "tie_word_embeddings": False, "mixer_rms_eps": 1e-5},
        {
            "state_size": 5,
            "conv_kernel": 3,
            "use_bias": True,
            "tie_word_embeddings": False,
            "mixer_rms_eps": 1e-3,
            "layer_norm_epsilon": 1e-3,
        },
        {"state_size": 9, "conv_kernel": 2, "expand": 2, "tie_word_embeddings": False, "mixer_rms_eps": 1e-1},
    ),
    "falcon_h1": (
        HYBRID
        | {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False, "mlp_multipliers": [0.7, 1.3], "ssm_multipliers": [0.6, 0.7, 0.8, 1.2, 1.4]}
        | {"key_multiplier": 0.6, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.9}
        | {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.6},
        HYBRID
        | {"mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_expand": 1, "attention_bias": True, "mlp_bias": True}
        | {"mamba_proj_bias": True, "projectors_bias": True, "key_multiplier": 0.5, "attention_in_multiplier": 1.5},
        HYBRID
        | {"mamba_d_ssm": 30, "mamba_n_heads": 3, "mamba_n_groups": 3, "mamba_rms_norm": True, "mamba_d_conv": 2}
        | {"rms_norm_eps": 1e-2},
    ),
    "granitemoehybrid": (
        GRANITE
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 24, "mamba_n_groups": 2},
        GRANITE
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_local_experts": 0}
        | {"shared_intermediate_size": 56, "residual_multiplier": 0.6, "embedding_multiplier": 3.0}
        | {"logits_scaling": 1.7, "attention_bias": True},
        GRANITE
        | {"layer_types": ["full_attention", "linear_attention"] * 2 + ["linear_attention"]}
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "shared_intermediate_size": 40}
        | {"position_embedding_type": "rope", "mamba_n_heads": 5, "mamba_conv_bias": False, "mamba_proj_bias": True},
    ),
    "bamba": (
        HYBRID
        | {"mamba_n_heads": 8, "attn_layer_indices": [1]}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}},
        HYBRID | {"mamba_n_heads": 6, "attn_layer_indices": [2], "attention_bias": True, "mamba_n_groups": 3},
        HYBRID | {"mamba_n_heads": 5, "attn_layer_indices": [0, 3], "mlp_bias": True, "mamba_proj_bias": True},
    ),
    "nemotron_h": (
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
        NEMOTRON
        | {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe"], "n_routed_experts": 6}
        | {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5},
        NEMOTRON
        | {"layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"], "time_step_min": 0.8}
        | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False},
    ),
    "mamba2": (
        {"state_size": 16, "n_groups": 2, "chunk_size": 8},
        {"state_size": 24, "n_groups": 1, "conv_kernel": 3, "use_bias": True, "use_conv_bias": False}
        | {"tie_word_embeddings": True},
        {"state_size": 8, "n_groups": 5, "conv_kernel": 2, "time_step_limit": [0.4, 0.9]}
        | {"layer_norm_epsilon": 1e-2},
    ),
    "qwen2_vl": ({"rope_parameters": MROPE}, {"rope_parameters": MROPE | {"mrope_section": [4, 4, 4]}}, SHORT_MROPE),
    "qwen2_5_vl": ({"rope_parameters": MROPE}, {"rope_parameters": MROPE | {"mrope_section": [2, 5, 5]}}, SHORT_MROPE),
    "qwen3_vl": (
        {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        {"rope_parameters": MROPE | {"mrope_interleaved": True, "mrope_section": [4, 4, 4]}},
        {"attention_bias": True, "rope_parameters": MROPE | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}},
    ),
    "internlm3": ({}, {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}, {}),
    "helium": ({}, {"rms_norm_eps": 1e-5, "mlp_bias": True}, {"tie_word_embeddings": True}),
    "dots1": (
        MOE | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "max_window_layers": 4},
        MOE
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "norm_topk_prob": True}
        | {"sliding_window": WINDOW, "max_window_layers": 1, "attention_bias": True},
        MOE
        | {"n_routed_experts": 9, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 0}
        | {"sliding_window": None, "n_group": 3, "topk_group": 2},
    ),
    "solar_open": (
        SOLAR | {"n_routed_experts": 6, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0},
        SOLAR | {"n_routed_experts": 5, "num_experts_per_tok": 3, "attention_bias": True, "norm_topk_prob": False},
        SOLAR | {"n_routed_experts": 9, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2},
    ),
    "llama4_text": (
        LLAMA4 | {"num_experts_per_tok": 2, "interleave_moe_layer_step": 2},
        LLAMA4
        | {"moe_layers": [0, 2], "use_qk_norm": False, "attention_chunk_size": 5, "floor_scale": 3}
        | {"no_rope_layers": [0, 1, 1], "attn_scale": 0.3},
        LLAMA4
        | {"attn_temperature_tuning": False, "attention_bias": True, "attention_chunk_size": 3}
        | {"layer_types": ["chunked_attention", "full_attention"] * 2 + ["chunked_attention"]}
        | {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}},
    ),
    "phimoe": (
        {"num_local_experts": 3, "lm_head_bias": True, "attention_bias": True},
        {"num_local_experts": 5, "router_jitter_noise": 0.2, "sliding_window": WINDOW},
        {"num_local_experts": 4, "router_jitter_noise": 0.0}
        | {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.3, "long_mscale": 1.4}
            | {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
        },
    ),
}
VARIANTS["qwen3_vl_moe"] = tuple(
    entries | {"num_experts": experts, "num_experts_per_tok": active, "moe_intermediate_size": 24}
    for entries, experts, active in zip(VARIANTS["qwen3_vl"], (6, 5, 4), (2, 3, 1), strict=True)
)
EXTRA = {
    "qwen2_moe": {"shared_expert_intermediate_size": 48},
    "cohere2": {"rotary_pct": 1.0},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB},
}
NO_HEAD_DIM = {
    "smollm3",
    "olmo2",
    "olmo3",
    "olmoe",
    "granite",
    "cohere",
    "cohere2",
    "starcoder2",
    "stablelm",
    "phi",
} | {*("phimoe", "qwen2_moe", "gpt_neox", "gpt2", "qwen2_vl", "qwen2_5_vl", "lfm2", "lfm2_moe", "granitemoe", "falcon")}
NO_HEAD_DIM |= {"hyperclovax", "granitemoeshared", "exaone_moe", "qwen2", "phi3"}
GPTS = ("gpt2", "gpt_bigcode", "gptj")
NO_HEAD_DIM |= {*GPTS, "gpt_neo", "bloom", "opt"}
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")
NO_HEAD_DIM |= {*LATENTS}
STATE_SPACES = ("mamba", "falcon_mamba", "mamba2")
NO_HEAD_DIM |= {*STATE_SPACES, "falcon_h1", "bamba", "granitemoehybrid"}
ONE_TO_ONE = ("phi", "gpt_neox", *LATENTS)  # no shared KV heads
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
FAMILIES = tuple(VARIANTS)


def family_config(family: str, shape: int) -> dict[str, Any]:
    """The entries of one config.json; sizes that a family derives itself are left to it."""
    heads, kv_heads, head_dim, width, hidden, layers = SHAPES[shape]
    if family in NO_HEAD_DIM:
        width = heads * head_dim
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family in ONE_TO_ONE else kv_heads,
        "hidden_size": width,
        "intermediate_size": 4 * width if family == "phi" else hidden,
        "num_hidden_layers": layers,
    }
    if family in GPTS:
        sizes = {"n_embd": width, "n_head": heads, "n_layer": layers, "n_positions": 64}
    if family == "bloom":
        sizes = {"hidden_size": width, "n_head": heads, "n_layer": layers}
    if family == "gpt_neo":
        sizes = {"hidden_size": width, "num_heads": heads, "num_layers": layers}
    if family == "opt":
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}
    if family in STATE_SPACES:
        sizes = {"hidden_size": width, "num_hidden_layers": layers}
    if family == "nemotron_h":
        del sizes["num_hidden_layers"]
    if family == "mamba2":
        sizes |= {"num_heads": heads, "head_dim": head_dim, "expand": 1}
    if family == "falcon":
        del sizes["num_key_value_heads"], sizes["intermediate_size"]
    if family not in NO_HEAD_DIM and family not in STATE_SPACES:
        sizes["head_dim"] = head_dim
    return BASE | sizes | EXTRA.get(family, {}) | VARIANTS[family][shape]


def family_folder(family: str, shape: int, folder: Path) -> tuple[Any, Path]:
    """Make a model of transformers, give every tensor values that show in the logits, and save it."""
    entries, kind = family_config(family, shape), transformers.AutoModelForCausalLM
    if family in VISION:
        entries, kind = _beside_vision(family, entries), transformers.AutoModelForImageTextToText
    config = transformers.AutoConfig.for_model(family, **entries)
    config._attn_implementation = "eager"
    model = kind.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed=zlib.crc32(f"{family}-{shape}".encode()))
    path = folder / f"{family}-{shape}"
    model.save_pretrained(path)
    return model, path


def _beside_vision(family: str, text: dict[str, Any]) -> dict[str, Any]:
    """The config of a model that also has a part for images."""
    width = text["hidden_size"]
    sizes = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32, "patch_size": 4}
    vision = sizes | ({"embed_dim": 32, "hidden_size": width} if family == "qwen2_vl" else {"out_hidden_size": width})
    ids = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    extra = {"deepstack_visual_indexes": [0]} if family.startswith("qwen3_vl") else {}
    tokens = {f"{kind}_token_id": VOCAB - 1 for kind in ("image", "video", "vision_start", "vision_end")}
    return {"text_config": text, "vision_config": vision | extra} | ids | tokens


def randomise(model: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    is_offset = model.config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5"))
    norm_mean = (
        0.0
        if is_offset and model.config.model_type not in ("gemma4_text", "gemma4_unified_text", "gemma3n_text")
        else 1.0
    )
    numbers = {name for name, values in model.named_buffers() if values.dtype != torch.bool}  # no masks
    kept = {name for name in numbers if "bias" in name or "layer_scalar" in name}
    for name, values in [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in kept)]:
        drawn = rng.standard_normal(tuple(values.shape))
        if values.ndim > 1:
            drawn *= 0.5 if "emb" in name else 1.2 / np.sqrt(values.shape[-1])
        else:
            drawn = 0.1 * drawn + (norm_mean if _is_about_one(name) else 0.0)
        with torch.no_grad():
            values.copy_(torch.from_numpy(drawn.astype(np.float32)))


def _is_about_one(name: str) -> bool:
    is_norm = "norm" in name.lower() and name.endswith("weight")
    return is_norm or name.endswith(("layer_scalar", "_scale", "router.scale"))
