"""Which keys of config.json may be there unread, and which are refused because they would change the arithmetic.

1. A key that the architecture read is settled.
2. OF_ONE_TYPE has what published files of one model type say, with the values that are true of it anyway; NEUTRAL the
   keys that change the arithmetic of some model: they pass with the values that change nothing.
3. HARMLESS has keys, and endings of keys, that change nothing at inference: training, token ids, ways of computing.
4. Every other key is refused if a word of its name is one of ARITHMETIC's, unless it is empty, 0 or 1 (num_*: only 0).
What is left (names, versions, notes of tools) passes. docs/model-files.md says the same to users.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "quantization_config": (None,),
    "mlp_bias": (None, False),
    "attention_bias": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1),
    "sliding_window": (None, 0),
    "use_sliding_window": (None, False),
    "use_bidirectional_attention": (None, False),
    "position_embedding_type": (None, "absolute"),
    "add_cross_attention": (None, False),
    "shared_expert_intermediate_size": (None, 0),
    "n_shared_experts": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "routed_scaling_factor": (None, 1),
    "moe_router_score_function": (None, "softmax"),
    "scoring_func": (None, "softmax"),
    "clip_qkv": (None,),
    "no_rope_layers": (None, []),
    "block_size": (None,),
    "block_length": (None,),
    "bd_size": (None,),
    # Off is what changes these: a model with them is the usual one.
    "causal": (None, True),
    "use_causal_mask": (None, True),
    "rope": (None, True),
    "use_rope": (None, True),
    "use_rotary_embeddings": (None, True),
    "scale_attn_weights": (None, True),
    "elementwise_affine": (None, True),
    "rope_interleaved": (None, False),
    "scale_logits": (None, False),
    "input_emb_norm": (None, False),
    "attention_layer_norm": (None, False),
    "layer_norm_with_affine": (None, True),
    "bias_for_layer_norm": (None, False),
    "block_group_size": (None, 1),
    "alibi": (None, False),
    "include_bias": (None, False),
    "include_qkv_bias": (None, False),
    "multi_query_attention": (None, False),
    "layer_norm_type": (None, "rms"),
    "activation_type": (None, "silu"),
    "block_type": (None, "llama"),
}
# Of single model types: keys of the published config.json files that say what the type is anyway. ANY: not read there.
ANY: Final = ("any",)
OF_ONE_TYPE: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "starcoder2": {"norm_type": ("layer_norm",), "mlp_type": ("default",), "activation_function": ANY},
    "stablelm": {"num_heads": ANY, "rope_pct": ANY, "norm_eps": ANY},
    "cohere2": {
        "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
        "layer_switch": (4,),
        "use_embedding_sharing": (True,),
        "use_parallel_block": (True,),
        "use_parallel_embedding": ANY,
    },
    "hunyuan_v1_dense": {
        "norm_type": ("rms",),
        "use_rotary_pos_emb": (True,),
        "num_experts": (0, 1),
        "use_cla": (False,),
        "cla_share_factor": ANY,  # of use_cla
        "dense_list": ANY,  # of classifiers
        "attention_head_dim": ANY,  # beside head_dim
    },
    "ernie4_5_moe": {
        "moe_capacity": ANY,  # of training
        "moe_gate": ("topk",),
        "moe_use_aux_free": (True,),
        "num_nextn_predict_layers": ANY,  # layers that draft tokens ahead are left out
    },
    "dots1": {"scoring_func": ("noaux_tc",)},
    "solar_open": {"intermediate_size": ANY},  # no layer is dense
    **{
        name: {"use_bidirectional_attention": ("vision",)} for name in ("gemma4_text", "diffusion_gemma_text")
    },  # of images
    "gpt_neox": {"num_key_value_heads": ANY},  # every head has its own
    "gpt_oss": {"experts_per_token": ANY},  # beside num_experts_per_tok
    **{
        name: {
            "norm_head": (False,),
            "norm_softmax": (False,),
            "use_rmsnorm": (True,),
            "using_split_qkv_in_self_attention": (False,),
            "moe_router_enable_expert_bias": (True,),
            "rotary_dim": ANY,  # beside partial_rotary_factor
        }
        for name in ("llada2_moe", "llada2_moe_veomni")
    },
    "modernbert": {
        "classifier_bias": ANY,  # as its tensor is there or not
        "position_embedding_type": ("absolute", "sans_pos"),
        "reference_compile": ANY,
        "repad_logits_with_grad": ANY,
        "layer_norm_eps": ANY,  # norm_eps is the one that transformers reads
    },
    "bert": {"emb_pooler": ("mean",)},  # Jina's
    "xlm-roberta": {
        "emb_pooler": ("mean",),
        **dict.fromkeys(("lora_alpha", "lora_rank", "lora_main_params_trainable"), ANY),  # of adapters
    },
    "nomic_bert": {
        **dict.fromkeys(("causal", "prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved"), (False,)),
        **dict.fromkeys(("moe_normalize_expert_weights", "expert_choice_router"), (False,)),
        "num_shared_experts": (0,),
        "ffn_div": (1,),
        "moe_impl": ANY,  # how experts are computed
        "router_aux_loss_coef": ANY,
        "scale_attn_by_inverse_layer_idx": (False,),
        "rotary_emb_fraction": (1,),
        "rotary_emb_scale_base": (),
        "rotary_scaling_factor": ANY,  # beyond max_trained_positions
        **dict.fromkeys(("parallel_block_tied_norm", "reorder_and_upcast_attn", "fused_bias_fc"), ANY),
        **dict.fromkeys(("fused_dropout_add_ln", "dense_seq_output", "pad_vocab_size_multiple"), ANY),
    },
    "bloom": {
        "masked_softmax_fusion": ANY,
        "offset_alibi": ANY,
        "skip_bias_add": ANY,
        "skip_bias_add_qkv": ANY,
    },
    "gptj": {"rotary": (True,)},
    "afmoe": {
        "route_norm": (True,),
        "score_func": ("sigmoid",),
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1,)),
    },
    "exaone_moe": {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "num_nextn_predict_layers": ANY,  # layers that draft tokens ahead are left out
    },
    "hy_v3": {
        **dict.fromkeys(("route_norm", "qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"), (True,)),
        "first_k_dense_replace": (1,),  # mlp_layer_types has the say
        "expert_hidden_dim": ANY,  # beside moe_intermediate_size
        **dict.fromkeys(("enable_attention_fp32_softmax", "enable_lm_head_fp32"), ANY),
        "num_nextn_predict_layers": ANY,  # that there are such layers is said by their tensors
    },
    "minimax_m2": {"qk_norm_type": ("per_layer",), "use_routing_bias": (True,), "mlp_intermediate_size": ANY},
}
HARMLESS: Final = frozenset(
    {
        "alibi_bias_max",  # of alibi, which is neutral only when it is off
        "attention_layer_norm_with_affine",
        "attention_implementation",
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "enable_moe_fp32_combine"),
        "attn_implementation",
        "attn_implementation_autoset",
        "cache_implementation",
        "chunk_size_feed_forward",
        # How experts and windows are used, where num_experts and sliding_window say that there are none.
        "decoder_sparse_step",
        "max_window_layers",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts_per_tok",
        "classifier_activation",
        "dense_intermediate_size",  # where every layer has experts
        "fuse_norm",
        "fuse_swiglu",
        "head_dtype",
        "is_decoder",  # of decoders
        "layer_norm_eps",  # every model type requires the one that it has
        "layer_norm_epsilon",
        "rms_norm_eps",
        "hidden_act",  # where the model type has hidden_activation, or the other way round
        "hidden_activation",
        "mlp_ratio",
        "model_max_length",
        "num_labels",
        "num_logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "qk_layernorm",  # the tensors of these norms are required, or refused
        "rope_full_precision",
        "rope_local_base_freq",  # where rope_parameters has it
        "sbert_ce_default_activation_function",
        "tie_word_embeddings",  # of encoders: they have no head
        "type_vocab_size",
        "sinusoidal_pos_embds",
        "decoder_bias",  # of a head for masked words
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "use_qk_norm",
        "sliding_window_size",  # of Gemma 2, beside sliding_window, which is the one that transformers reads
    }
)
_HARMLESS_NAME: Final = re.compile(
    r"^_|^(init|initializer|pooler|summary|gradient_checkpointing)(_|$)|dropout|pdrop|_loss|jitter|flash|dtype"
    r"|_token_(id|ids|index)$"
)
ARITHMETIC: Final = re.compile(
    r"(?<![a-z])(act|activation|alibi|attention|attn|base|beta|bias|bidirectional|blocks?|cap|causal|chunk|clip|conv"
    r"|dense|depth|dims?|emb|embd|embed|embeddings?|eps|epsilon|experts?|factor|ffn|gate|gating|heads?|hidden|indexer"
    r"|interleaved|intermediate|kv|latent|layernorm|layers?|logits?|lora|mamba|mlp|moe|mrope|multiplier|norm|normalize"
    r"|offset|parallel|position|positional|positions|qk|qkv|query|rank|recurrent|residual|rms|rope|rotary|routed|router"
    r"|scale|scaled|scaling|scalar|shared|sinks?|sliding|softcap|softcapping|softmax|sparse|ssm|swiglu|theta|tie|tied"
    r"|tying|topk|windows?|yarn)(?![a-z])"
)


def changes_arithmetic(key: str, value: object, model_type: str = "") -> bool:
    """Whether a key that was not read would make another model of it."""
    own = OF_ONE_TYPE.get(model_type, {}).get(key)
    if own is not None:
        return own is not ANY and value is not None and value not in own
    if key in NEUTRAL:
        return not any(value is neutral or value == neutral for neutral in NEUTRAL[key])
    if key in HARMLESS or _HARMLESS_NAME.search(key):
        return False
    return ARITHMETIC.search(key.lower()) is not None and not _is_empty(key, value)


def _is_empty(key: str, value: object) -> bool:
    """Nothing, off, or once: the values of a key that is there but not used. One of a number of things is one more."""
    if value is None or value in (False, 0, "", [], {}):
        return True
    return value is not True and value == 1 and not key.startswith(("num_", "n_"))
