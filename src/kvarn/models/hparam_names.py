"""The hyperparameters of models: each with its two spellings and the range of its values.

And the GGUF keys that may be there unread. Reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvarn.models.spec import Activation


@dataclass(frozen=True, slots=True)
class HParam:
    """The spellings of one hyperparameter and the range of its values."""

    gguf: str | None
    hf: tuple[str, ...]
    low: float
    high: float


HPARAMS: Final[Mapping[str, HParam]] = {
    "num_layers": HParam("block_count", ("n_layers", "n_layer", "num_layers", "num_hidden_layers"), 1, 1024),
    "width": HParam("embedding_length", ("d_model", "n_embd", "n_embed", "dim", "hidden_size"), 1, 2**20),
    "vocab_size": HParam("vocab_size", ("embedding_size", "vocab_size"), 1, 2**24),
    "context_length": HParam(
        "context_length", ("max_sequence_length", "n_positions", "seq_length", "max_position_embeddings"), 1, 2**30
    ),
    "hidden": HParam(
        "feed_forward_length",
        ("mlp_hidden_size", "n_inner", "ffn_hidden_size", "ffn_dim", "hidden_dim", "intermediate_size"),
        0,
        2**22,
    ),
    "num_heads": HParam("attention.head_count", ("n_heads", "n_head", "num_heads", "num_attention_heads"), 1, 1024),
    "num_kv_heads": HParam("attention.head_count_kv", ("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 0, 1024),
    "head_dim": HParam("attention.key_length", ("head_dim",), 1, 2**14),
    "value_dim": HParam("attention.value_length", (), 1, 2**14),
    "head_dim_full": HParam("attention.key_length", ("global_head_dim",), 1, 2**14),
    "head_dim_window": HParam("attention.key_length_swa", ("head_dim",), 1, 2**14),
    "value_dim_window": HParam("attention.value_length_swa", (), 1, 2**14),
    "num_kv_heads_full": HParam(None, ("num_global_key_value_heads",), 1, 1024),
    "num_shared_kv_layers": HParam("attention.shared_kv_layers", ("num_kv_shared_layers",), 0, 1024),
    "per_layer_length": HParam("embedding_length_per_layer_input", ("hidden_size_per_layer_input",), 0, 2**16),
    "num_streams": HParam("altup.num_inputs", ("altup_num_inputs",), 2, 64),
    "active_stream": HParam("altup.active_idx", ("altup_active_idx",), 0, 63),
    "laurel_rank": HParam(None, ("laurel_rank",), 1, 2**16),
    "per_layer_vocab_size": HParam(None, ("vocab_size_per_layer_input",), 1, 2**24),
    "sliding_window": HParam("attention.sliding_window", ("sliding_window",), 0, 2**30),
    "local_window": HParam(None, ("window_size",), 1, 2**30),
    "embedding_width": HParam(None, ("word_embed_proj_dim",), 1, 2**20),
    "rms_norm_eps": HParam("attention.layer_norm_rms_epsilon", ("rms_norm_eps",), 0, 1),
    "layer_norm_eps": HParam(
        "attention.layer_norm_epsilon", ("norm_epsilon", "layer_norm_epsilon", "norm_eps", "layer_norm_eps"), 0, 1
    ),
    "attn_softcap": HParam("attn_logit_softcapping", ("attn_logit_softcapping",), 0, 1e6),
    "final_softcap": HParam("final_logit_softcapping", ("final_logit_softcapping",), 0, 1e6),
    "query_pre_attn_scalar": HParam(None, ("query_pre_attn_scalar",), 1, 2**20),
    "num_experts": HParam(
        "expert_count", ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 0, 1024
    ),
    "num_active_experts": HParam(
        "expert_used_count", ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k"), 0, 1024
    ),
    "expert_hidden": HParam(
        "expert_feed_forward_length", ("moe_intermediate_size", "expert_intermediate_size"), 1, 2**22
    ),
    "shared_hidden": HParam(
        "expert_shared_feed_forward_length",
        ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
        0,
        2**22,
    ),
    "num_shared_experts": HParam(
        "expert_shared_count", ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), 0, 1024
    ),
    "num_dense_layers": HParam(
        "leading_dense_block_count", ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0, 1024
    ),
    "least_share": HParam(None, ("moe_norm_min",), 0, 1),
    "last_sparse_layer": HParam(None, ("moe_layer_end_index",), -1, 1024),
    "sparse_interval": HParam(
        "interleave_moe_layer_step", ("moe_layer_interval", "interleave_moe_layer_step"), 1, 1024
    ),
    "expert_period": HParam("moe_every_n_layers", ("moe_every_n_layers",), 0, 1024),
    "dense_hidden": HParam("feed_forward_length", ("intermediate_size_mlp",), 1, 2**22),
    "chunk": HParam("attention.sliding_window", ("attention_chunk_size",), 0, 2**30),
    "tuning_scale": HParam("attention.temperature_scale", ("attn_scale",), 0, 1e3),
    "tuning_length": HParam("attention.temperature_length", ("floor_scale",), 1, 2**30),
    "router_jitter": HParam(None, ("router_jitter_noise",), 0, 1),
    "rope_short_magnitude": HParam(None, ("short_mscale",), 0, 1e3),
    "rope_long_magnitude": HParam(None, ("long_mscale",), 0, 1e3),
    "expert_scale": HParam(
        "expert_weights_scale", ("routed_scaling_factor", "router_scaling_factor", "route_scale"), 0, 1e4
    ),
    "num_draft_layers": HParam("nextn_predict_layers", (), 0, 64),
    "num_groups": HParam("expert_group_count", ("n_group",), 1, 1024),
    "num_active_groups": HParam("expert_group_used_count", ("topk_group",), 1, 1024),
    "query_rank": HParam("attention.q_lora_rank", ("q_lora_rank",), 1, 2**16),
    "latent_rank": HParam("attention.kv_lora_rank", ("kv_lora_rank",), 1, 2**16),
    "latent_nope_dim": HParam(None, ("qk_nope_head_dim",), 1, 2**14),
    "latent_rope_dim": HParam("rope.dimension_count", ("qk_rope_head_dim",), 2, 2**14),
    "latent_key_dim": HParam("attention.key_length_mla", (), 1, 2**14),
    "latent_value_dim": HParam("attention.value_length_mla", ("v_head_dim",), 1, 2**14),
    "depth_scale": HParam(None, ("scale_depth",), 1e-6, 1e6),
    "base_width": HParam(None, ("dim_model_base",), 1, 2**20),
    "swiglu_limit": HParam(None, ("swiglu_limit",), 0, 1e6),
    "swiglu_alpha": HParam(None, ("swiglu_alpha",), 0, 1e6),
    "attention_scale": HParam("attention.scale", ("attention_multiplier",), 1e-6, 1e6),
    "embedding_scale": HParam("embedding_scale", ("embedding_multiplier", "scale_emb"), 1e-6, 1e6),
    "residual_scale": HParam("residual_scale", ("residual_multiplier",), 1e-6, 1e6),
    "logit_scale": HParam("logit_scale", ("logit_scale", "logits_scaling"), 1e-6, 1e6),
    "temperature_beta": HParam("attention.temperature_scale", ("llama_4_scaling_beta",), 0, 1e3),
    "no_rope_interval": HParam(None, ("no_rope_layer_interval",), 1, 1024),
    "window_pattern": HParam("attention.sliding_window_pattern", ("sliding_window_pattern",), 0, 1024),
    "rope_alpha": HParam(None, ("alpha",), 1e-3, 1e6),
    "rope_log_multiplier": HParam("rope.scaling.yarn_log_multiplier", (), 0, 1e3),
    "rotary_dim": HParam(None, ("rotary_dim",), 2, 2**14),
    "decoder_sparse_step": HParam(None, ("decoder_sparse_step",), 1, 1024),
    "first_window_layer": HParam(None, ("max_window_layers",), 0, 1024),
    # KV blocks are whole blocks of it: 255 and 16 make blocks of 4,080 tokens. Trained models have 4 to 64.
    "diffusion_block_length": HParam("diffusion.block_length", ("block_size", "bd_size"), 1, 256),
    "conv_kernel": HParam("ssm.conv_kernel", ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"), 1, 64),
    "short_conv_kernel": HParam("shortconv.l_cache", ("conv_L_cache",), 2, 64),
    "state_key_dim": HParam(
        "ssm.state_size", ("linear_key_head_dim", "state_size", "ssm_state_size", "mamba_d_state"), 1, 2**12
    ),
    "state_value_dim": HParam(None, ("linear_value_head_dim",), 1, 2**12),
    "num_state_key_heads": HParam("ssm.group_count", ("linear_num_key_heads", "n_groups", "mamba_n_groups"), 1, 1024),
    "num_state_heads": HParam(
        "ssm.time_step_rank", ("linear_num_value_heads", "num_heads", "mamba_num_heads", "mamba_n_heads"), 1, 1024
    ),
    "state_inner": HParam("ssm.inner_size", ("mamba_d_ssm",), 1, 2**20),
    "state_head_dim": HParam(None, ("mamba_head_dim",), 1, 2**12),
    "step_rank": HParam("ssm.time_step_rank", ("time_step_rank",), 1, 2**16),
    "least_step": HParam(None, ("time_step_min",), 0, 1e6),
    "parameter_norm_eps": HParam(None, ("mixer_rms_eps",), 0, 1),
    "head_scale": HParam(None, ("lm_head_multiplier",), 1e-6, 1e6),
    **{
        f"{name}_multiplier": HParam(None, (f"{name}_multiplier",), 1e-6, 1e6)
        for name in ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
    },
    "state_expand": HParam(None, ("expand", "mamba_expand"), 1, 64),
    "full_attention_interval": HParam("full_attention_interval", ("full_attention_interval",), 1, 1024),
    "ffn_multiple": HParam(None, ("block_multiple_of",), 1, 2**20),
    "ffn_multiplier": HParam(None, ("block_ffn_dim_multiplier",), 1e-6, 1e6),
    "local_attention": HParam("attention.sliding_window", ("local_attention",), 1, 2**30),
    "global_layer_period": HParam("attention.sliding_window_pattern", ("global_attn_every_n_layers",), 1, 1024),
    "rope_base_global_layers": HParam(None, ("global_rope_theta",), 1.001, 1e15),
    "rope_base_local_layers": HParam(None, ("local_rope_theta",), 1.001, 1e15),
    "trained_positions": HParam(None, ("max_trained_positions",), 1, 2**30),
    "padding_id": HParam(None, ("pad_token_id",), 0, 2**24),
    "pooling_type": HParam("pooling_type", (), 0, 16),
    "rope_dims": HParam("rope.dimension_count", (), 2, 2**14),
    "rope_dims_window": HParam("rope.dimension_count_swa", (), 2, 2**14),
    "rope_base": HParam("rope.freq_base", ("rope_theta",), 1.001, 1e15),
    "rope_base_local": HParam("rope.freq_base_swa", ("rope_local_base_freq",), 1.001, 1e15),
    "partial_rotary_factor": HParam(None, ("partial_rotary_factor", "rotary_pct"), 0, 1),
    "rope_factor": HParam("rope.scaling.factor", ("factor",), 1e-6, 1e6),
    "rope_original_context": HParam(
        "rope.scaling.original_context_length", ("original_max_position_embeddings",), 1, 2**30
    ),
    "rope_magnitude": HParam("rope.scaling.attn_factor", ("attention_factor",), 0, 1e3),
    "rope_beta_fast": HParam("rope.scaling.yarn_beta_fast", ("beta_fast",), 1e-3, 1e6),
    "rope_beta_slow": HParam("rope.scaling.yarn_beta_slow", ("beta_slow",), 1e-3, 1e6),
    "rope_mscale": HParam(None, ("mscale",), 0, 1e3),
    "rope_mscale_all_dim": HParam(None, ("mscale_all_dim",), 0, 1e3),
    "rope_low_frequency": HParam(None, ("low_freq_factor",), 1e-3, 1e6),
    "rope_high_frequency": HParam(None, ("high_freq_factor",), 1e-3, 1e6),
}
# Keys of config.json that are names of one number: transformers takes the one that stands last.
ONE_NUMBER: Final = frozenset(
    {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"}
)
# GGUF keys that describe a file but change no arithmetic.
HARMLESS: Final = {
    "vocab_size",
    "tensor_data_layout",
    "classifier.output_labels",
    "rope.scaling.finetuned",
    "embedding_length_per_head",
    "rope.dimension_sections",  # of positions in images: those of a text are all the same
    "n_deepstack_layers",  # of what images add
}
# Keys that do change it, with the one value that makes them harmless.
GGUF_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "expert_gating_func": (0, 1),  # 1 is softmax
    "expert_weights_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "use_parallel_residual": (False,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "pooling_type": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.head_count": (0,),
    "feed_forward_length": (0,),
}
ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
