"""The keys of config.json of encoders, as families.py has them of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvarn.models.config.shared_keys import BIASES, DECODER

_BERT: Final[dict[str, Any]] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": None,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "is_decoder": False,
    "position_embedding_type": "absolute",
}
_JINA_ROPE: Final[dict[str, Any]] = {"rotary_emb_base": None, "lora_adaptations": None}
_MODERNBERT: Final[dict[str, Any]] = {
    **{key: _BERT[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")},
    "num_hidden_layers": 22,
    "intermediate_size": 1152,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "hidden_activation": "gelu",
    "local_attention": 128,
    "global_attn_every_n_layers": None,
    "global_rope_theta": None,
    "local_rope_theta": None,
    "layer_types": None,
    "rope_parameters": None,
    "rope_scaling": None,
    **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "is_decoder"), False),
    "classifier_activation": "gelu",
    "classifier_pooling": "cls",
}
_NOMIC: Final[dict[str, Any]] = {
    **{key: _BERT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    **dict.fromkeys(("n_embd", "n_layer", "n_head", "n_inner", "n_positions"), None),  # as its authors call them
    "vocab_size": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "max_trained_positions": None,
    "layer_norm_eps": 1e-12,
    "layer_norm_epsilon": None,
    "hidden_act": "silu",
    "activation_function": None,
    "rope_theta": None,
    "rotary_emb_base": 1000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "original_max_position_embeddings": None,
    "is_decoder": False,
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
    "moe_every_n_layers": 0,
    "num_experts": None,
    "moe_top_k": None,
}
ENCODERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bert": _BERT | {"feed_forward_type": None},
    **dict.fromkeys(("roberta", "camembert"), _BERT | {"pad_token_id": 1}),
    "xlm-roberta": _BERT | _JINA_ROPE | {"pad_token_id": 1},
    "jina_embeddings_v3": {key: value for key, value in _BERT.items() if key != "position_embedding_type"}
    | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    | {"max_position_embeddings": 8194, "layer_norm_eps": 1e-5, "rope_theta": 20000.0}
    | {"rope_parameters": None, "rope_scaling": None, "lora_adaptations": None},
    "distilbert": {
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
        "vocab_size": None,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,  # no key of the class, which has no other
        "activation": "gelu",
        "is_decoder": False,
    },
    "modernbert": _MODERNBERT,
    "eurobert": DECODER
    | BIASES
    | {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    | {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "is_decoder": False},
    "nomic_bert": _NOMIC,
}
